"""What the networks read, prepared on the CPU and free of torch, so that it can cross to another process as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.layout import Grid, PrefixLayout


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One CFG branch's vision-language sequence. The first `num_system_tokens` are read by the encoder and dropped
    from its output; `layout` describes the rest."""

    input_ids: tuple[int, ...]
    num_system_tokens: int
    layout: PrefixLayout


@dataclass(frozen=True, slots=True)
class ConditionImage:
    """A condition image at its working size: `rgba` (height, width, 4) for the VAE, `rgb` (height, width, 3)
    composited over white for the vision encoder; both uint8. `digest` is equal for equal pictures."""

    rgba: np.ndarray
    rgb: np.ndarray
    grid: Grid
    digest: bytes
