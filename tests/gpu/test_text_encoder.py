"""The fused text encoder against its plain forward of the same weights, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.config import CheckpointConfigs
from models.preprocess import PromptTokenizer, prepare_condition_image
from models.text_encoder import TextEncoder
from tests.closeness import relative_error
from tests.pictures import photo


def load(folder: Path, dtype: torch.dtype) -> TextEncoder:
    encoder = TextEncoder.build(folder / "text_encoder", folder / "processor")
    encoder.load(folder / "text_encoder", dtype, torch.device("cuda"))
    return encoder


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_error_is_no_worse_than_the_plain_forwards(checkpoint: Path, graphs: bool, num_images: int) -> None:
    exact, theirs, ours = (
        load(checkpoint, torch.float32),
        load(checkpoint, torch.bfloat16),
        load(checkpoint, torch.bfloat16),
    )
    ours.fuse(graphs)
    px_per_token = CheckpointConfigs.read(checkpoint).px_per_token
    images = [
        prepare_condition_image(photo("RGBA", (60 + 30 * index, 90)).convert("RGBA"), 96**2, px_per_token)
        for index in range(num_images)
    ]
    tokenize = PromptTokenizer(checkpoint / "processor")
    for words in (1, 40, 3, 90, 700):  # back and forth between captured lengths, and beyond them
        prompt = tokenize("star " * words, [image.grid for image in images])
        expected = exact.encode(prompt, images)
        reference_error = relative_error(theirs.encode(prompt, images), expected)
        assert relative_error(ours.encode(prompt, images), expected) <= 1.5 * reference_error
