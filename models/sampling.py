"""The numbers of the denoise loop: sigma schedule, starting noise, guidance and the Euler update.

The schedule is computed by diffusers' `FlowMatchEulerDiscreteScheduler` from the checkpoint's own scheduler config; a
fresh instance per request, because it carries state. Everything else is plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from models.layout import Grid


def sigma_schedule(
    scheduler_config: Mapping[str, Any],
    num_steps: int,
    num_target_tokens: int,
    sample_sigmas: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Sigmas of a request: one a step, falling, then the final one (0).

    The grid is `sample_sigmas` where the checkpoint ships them (their number is the number of steps), else evenly
    spaced from 1 to 1 / num_steps; the scheduler then shifts it by the number of target tokens.
    """
    grid = np.linspace(1.0, 1 / num_steps, num_steps) if sample_sigmas is None else np.asarray(sample_sigmas)
    overrides = {"shift_terminal": None} if len(grid) == 1 else {}  # stretching a single sigma is 0 / 0
    scheduler = FlowMatchEulerDiscreteScheduler.from_config({**scheduler_config, **overrides})
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (num_target_tokens - config.base_image_seq_len)
    scheduler.set_timesteps(sigmas=grid, mu=mu)
    return tuple(scheduler.sigmas.tolist())


def starting_noise(seed: int, grid: Grid, channels: int) -> Tensor:
    """The latents a seed starts from: (tokens, channels), float32, drawn on the CPU so that every device starts from
    the same picture."""
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn(1, 1, channels, grid.height, grid.width, generator=generator)
    return noise.reshape(channels, grid.num_tokens).T.contiguous()


def guide(cond: Tensor, uncond: Tensor, scale: float) -> Tensor:
    """True classifier-free guidance: away from the unconditional prediction by `scale`."""
    return uncond + scale * (cond - uncond)


def clean_estimate(latents: Tensor, velocity: Tensor, sigma: float) -> Tensor:
    """Where the velocity points from `latents` at `sigma`: the picture without its noise, as far as the network sees it
    at this step. In the dtype of `latents`."""
    return (latents.float() - sigma * velocity.float()).to(latents.dtype)


def euler_update(latents: Tensor, velocity: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """One step along the velocity, in float32, cast back to the dtype of `latents`."""
    return (latents.float() + (next_sigma - sigma) * velocity.float()).to(latents.dtype)
