"""Our networks and the reference's, from the same folders."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from diffusers import QwenImage21Pipeline

from models.config import CheckpointConfigs
from models.image_model import ImageModel
from models.preprocess import PromptTokenizer
from tests.oracle import reference_pipeline


class Pair(NamedTuple):
    model: ImageModel
    tokenizer: PromptTokenizer
    reference: QwenImage21Pipeline


@pytest.fixture(scope="session")
def pairs(checkpoints: dict[str, Path]) -> dict[str, Pair]:
    def pair(folder: Path) -> Pair:
        model = ImageModel.load(CheckpointConfigs.read(folder), torch.device("cpu"), torch.float32)
        return Pair(model, PromptTokenizer(folder / "processor"), reference_pipeline(folder))

    return {name: pair(folder) for name, folder in checkpoints.items()}


@pytest.fixture(params=["first", "second"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]
