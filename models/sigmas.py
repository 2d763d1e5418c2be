"""The sigma schedule of a request, by diffusers' `FlowMatchEulerDiscreteScheduler` from the checkpoint's own config.

It is a module of its own because of what it imports: the worker, which is given sigmas, starts seconds earlier without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler


def sigma_schedule(
    scheduler_config: Mapping[str, Any],
    num_steps: int,
    num_target_tokens: int,
    sample_sigmas: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Sigmas of a request: one a step, falling, then the final one (0).

    The grid is `sample_sigmas` where the checkpoint ships them (their number is the number of steps), else evenly
    spaced from 1 to 1 / num_steps; the scheduler then shifts it by the number of target tokens. Each call has its own
    instance, which carries state.
    """
    grid = np.linspace(1.0, 1 / num_steps, num_steps) if sample_sigmas is None else np.asarray(sample_sigmas)
    overrides = {"shift_terminal": None} if len(grid) == 1 else {}  # stretching a single sigma is 0 / 0
    scheduler = FlowMatchEulerDiscreteScheduler.from_config({**scheduler_config, **overrides})
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (num_target_tokens - config.base_image_seq_len)
    scheduler.set_timesteps(sigmas=grid, mu=mu)
    return tuple(scheduler.sigmas.tolist())
