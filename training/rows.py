"""Tokenized prompts and pictures as rows of tensors: what the training forward reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.inputs import TokenizedPrompt
from training.spec import PATCH_PX

# Padded length of the last text by number of condition images: longer than any caption or instruction, and such that
# every part of the sequence is a multiple of eight.
PAD_TAILS = (48, 25, 27)


def pad_rows(prompts: Sequence[TokenizedPrompt], pad_tail: int) -> tuple[Tensor, Tensor]:
    """Token ids (rows, padded length) and lengths (rows,) of prompts that share their layout up to the last text."""
    lengths = [len(prompt.input_ids) for prompt in prompts]
    leads = {len(prompt.input_ids) - prompt.layout.segments[-1].num_tokens for prompt in prompts}
    (lead,) = leads
    padded = np.zeros((len(prompts), lead + pad_tail), np.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = prompt.input_ids
    return torch.from_numpy(padded), torch.tensor(lengths)


def patches_of(pictures: Tensor) -> Tensor:
    """RGB pictures (rows, height, width, 3) cut into patches, raster order: (rows, patches, 3 × side²), same dtype."""
    blocks = pictures.unflatten(1, (-1, PATCH_PX)).unflatten(3, (-1, PATCH_PX))
    return blocks.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
