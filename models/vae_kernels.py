"""Triton kernels of the image autoencoder: norms with what surrounds them, and residuals with the biases of the
convolutions before them, each in one pass over channels-last memory. `models.vae` holds the plain counterparts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements a program


@triton.jit
def _rms_norm(
    x, bias, gamma, out, pixels, channels, root,
    BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (pixel < pixels) & (channel < channels)
    at = pixel * channels + channel
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
        value = tl.where(inside, value, 0.0)
    length = tl.maximum(tl.sqrt(tl.sum(value * value, axis=1)), 1e-12)[:, None]
    value = value / length * root * tl.load(gamma + channel, mask=channel < channels, other=0.0).to(tl.float32)
    if SILU:
        value *= tl.sigmoid(value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, gamma: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """RMS norm over the channels of `x + bias`, times `gamma`, then SiLU if asked. x is (rows, channels, height, width)
    in channels-last memory."""
    rows, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(channels)
    pixels = max(1, TILE // block)
    count = rows * height * width
    _rms_norm[(triton.cdiv(count, pixels),)](
        x, x if bias is None else bias, gamma, out, count, channels, channels**0.5,
        BIAS=bias is not None, SILU=silu, BLOCK=block, PIXELS=pixels, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _add(x, bias, other, other_bias, count, channels, OTHER_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    channel = at % channels
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    if OTHER_BIAS:
        value += tl.load(other_bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


def add_(x: Tensor, bias: Tensor, other: Tensor, other_bias: Tensor | None = None) -> Tensor:
    """`x + bias + other + other_bias` in place; biases are per channel, all tensors in channels-last memory."""
    other = other.contiguous(memory_format=torch.channels_last)
    _add[(triton.cdiv(x.numel(), TILE),)](
        x, bias, other, bias if other_bias is None else other_bias, x.numel(), x.shape[1],
        OTHER_BIAS=other_bias is not None, BLOCK=TILE, num_warps=4,
    )  # fmt: skip
    return x


@triton.jit
def _add_shuffled(
    x, bias, small, rows, height, width, channels, small_channels, frames, repeats,
    BLOCK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]
    column, row, image = pixel % width, pixel // width % height, pixel // width // height
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (image < rows) & (channel < channels)
    source = ((channel * frames + frames - 1) * 4 + row % 2 * 2 + column % 2) // repeats
    at_small = ((image * (height // 2) + row // 2) * (width // 2) + column // 2) * small_channels + source
    at = pixel * channels + channel
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    value += tl.load(small + at_small, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


def add_shuffled_(x: Tensor, bias: Tensor, small: Tensor, frames: int) -> Tensor:
    """`x + bias` plus the shortcut of an `UpBlock` from `small`, at half the height and width, in place."""
    small = small.contiguous(memory_format=torch.channels_last)
    rows, channels, height, width = x.shape
    block = triton.next_power_of_2(channels)
    pixels = max(1, TILE // block)
    repeats = channels * frames * 4 // small.shape[1]
    _add_shuffled[(triton.cdiv(rows * height * width, pixels),)](
        x, bias, small, rows, height, width, channels, small.shape[1], frames, repeats,
        BLOCK=block, PIXELS=pixels, num_warps=4,
    )  # fmt: skip
    return x
