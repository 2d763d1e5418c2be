"""Finding a checkpoint's folder: the embedded one, one on disk, or one from the hub."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from models.errors import CheckpointError

_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]


def embedded_checkpoint() -> Path:
    """The small checkpoint that ships with the package."""
    return Path(__file__).parent / "demo"


def find_checkpoint(model: str, weights: bool = True) -> Path:
    """The folder of a checkpoint: `model` itself when it is one, else the hub repository of that id (downloaded once,
    then taken from the cache), with or without its weights."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise CheckpointError(f"{model} is neither a folder nor a hub id of the form owner/name")
    # The hub's client takes a third of a second to import, which a folder on disk need not wait for.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").handlers.clear()  # its own format; the root logger has the service's
    if not sys.stderr.isatty():  # else bars stand between the lines of a log, and a full one ends the download
        disable_progress_bars()
    try:
        files = _HUB_FILES if weights else [pattern for pattern in _HUB_FILES if "safetensors" not in pattern]
        return Path(snapshot_download(model, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{model} could not be fetched from the hub: {error}") from None
