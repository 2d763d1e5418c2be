"""What figures of a GPU were measured on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

FLASH_3 = "fa3-fwd"


def environment() -> dict[str, str]:
    """This machine's GPU, and the versions that its speed depends on."""
    found = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    try:
        return found | {FLASH_3: version(FLASH_3)}
    except PackageNotFoundError:
        return found | {FLASH_3: "not installed"}
