"""What figures of a GPU were measured on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

FLASH_3 = "fa3-fwd"


def environment() -> dict[str, str]:
    """The GPU, and the versions that its speed depends on."""
    found = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none"}
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    try:
        found["attention"] = f"{FLASH_3} {version(FLASH_3)}"
    except PackageNotFoundError:
        found["attention"] = "PyTorch's"
    return found
