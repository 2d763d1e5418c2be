"""The numbers of the denoise loop: starting noise, guidance and the Euler update. Its sigmas are in `models.sigmas`."""

from __future__ import annotations

import torch
from torch import Tensor

from models.layout import Grid


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
