"""GPU tests are skipped where there is none; the fused path needs bfloat16 and Triton besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
