"""The sigma schedule of a request: the grid that diffusers' `FlowMatchEulerDiscreteScheduler` makes of its config.

The usual grids, shifted by a constant or by the number of target tokens, are a few lines and computed here: importing
diffusers takes longer than loading a small checkpoint. Every other kind that its scheduler knows, it computes itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

OTHER_KINDS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")
Grid = NDArray[np.float32]


def sigma_schedule(
    scheduler_config: Mapping[str, Any],
    num_steps: int,
    num_target_tokens: int,
    sample_sigmas: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Sigmas of a request: one a step, falling, then the final one (0).

    The grid is `sample_sigmas` where the checkpoint ships them (their number is the number of steps), else evenly
    spaced from 1 to 1 / num_steps; it is then shifted as the config says.
    """
    even = np.linspace(1.0, 1 / num_steps, num_steps) if sample_sigmas is None else np.asarray(sample_sigmas)
    grid = even.astype(np.float32)
    overrides = {"shift_terminal": None} if len(grid) == 1 else {}  # stretching a single sigma is 0 / 0
    config = {**scheduler_config, **overrides}
    first, last = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    shortest, longest = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    mu = first + (last - first) / (longest - shortest) * (num_target_tokens - shortest)
    if any(config.get(kind) for kind in OTHER_KINDS):
        return _by_diffusers(config, grid, mu)
    return (*_shifted(config, grid, mu).astype(np.float32).tolist(), 0.0)


def _shifted(config: Mapping[str, Any], grid: Grid, mu: float) -> Grid:
    if not config.get("use_dynamic_shifting", False):
        shift = config.get("shift", 1.0)
        shifted = shift * grid / (1 + (shift - 1) * grid)
    else:
        strength = math.exp(mu) if config.get("time_shift_type", "exponential") == "exponential" else mu
        shifted = strength / (strength + (1 / grid - 1))
    if terminal := config.get("shift_terminal"):
        rest = 1 - shifted
        shifted = 1 - rest / (rest[-1] / (1 - terminal))
    return shifted


def _by_diffusers(config: Mapping[str, Any], grid: Grid, mu: float) -> tuple[float, ...]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)  # one a call: it carries state
    scheduler.set_timesteps(sigmas=grid, mu=mu)
    return tuple(scheduler.sigmas.tolist())
