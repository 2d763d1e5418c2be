"""One processor folder for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.tokenizer import write_processor


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    write_processor(folder)
    return folder
