"""Triton kernels for what stands between the matrix products: each reads its inputs once and writes once.

`models.ops` holds the plain counterparts. They work in float32 inside; where the published
network rounds in between (the q/k norm before its weight, and before the rotation), they round there too. A program
handles one token, or one block of tokens, so shapes need not be powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.quantization import FP8, FP8_MAX, SMALLEST, Activation, Quantized

HEADS = 8  # a program
FP8_LIMIT = tl.constexpr(FP8_MAX)
SMALLEST_ROW = tl.constexpr(SMALLEST)


@triton.jit
def _store_row(out, scales, token, dim, channel, inside, value, FP8: tl.constexpr):
    """Write one token: as it is, or as E4M3 with its scale."""
    if FP8:
        largest = tl.maximum(tl.max(tl.abs(value), axis=0), SMALLEST_ROW)
        tl.store(scales + token, largest / FP8_LIMIT)
        value *= FP8_LIMIT / largest
    tl.store(out + token * dim + channel, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_modulate(
    x, branch, gate, scale, hidden, out, scales, tokens, dim, eps, ADD: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = token // tokens
    channel = tl.arange(0, BLOCK)
    inside = channel < dim
    value = tl.load(x + token * dim + channel, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        of_branch = tl.load(branch + token * dim + channel, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(gate + row * dim + channel, mask=inside, other=0.0).to(tl.float32) * of_branch
        rounded = value.to(hidden.dtype.element_ty)
        tl.store(hidden + token * dim + channel, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / dim, 0.0)
    centred *= tl.rsqrt(tl.sum(centred * centred, axis=0) / dim + eps)
    centred *= tl.load(scale + row * dim + channel, mask=inside, other=0.0).to(tl.float32)
    _store_row(out, scales, token, dim, channel, inside, centred, FP8)


def norm_modulate(x: Tensor, scale: Tensor, eps: float, fp8: bool = False) -> Activation:
    """See `models.ops.PlainOps`; x is (rows, tokens, dim), contiguous, scale (rows, 1, dim)."""
    return _normed(x, x, x, scale, eps, add=False, fp8=fp8)


def add_norm_modulate(
    x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, eps: float, fp8: bool = False
) -> tuple[Tensor, Activation]:
    """See `models.ops.PlainOps`. `x` is overwritten by the sum."""
    return x, _normed(x, gate.contiguous(), branch, scale, eps, add=True, fp8=fp8)


def _normed(x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, eps: float, add: bool, fp8: bool) -> Activation:
    rows, tokens, dim = x.shape
    out, scales = _rows_like(x, dim, fp8)
    block = triton.next_power_of_2(dim)
    _norm_modulate[(rows * tokens,)](
        x, branch, gate, scale.contiguous(), x, out, scales, tokens, dim, eps,
        ADD=add, FP8=fp8, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return Quantized(out, scales) if fp8 else out


def _rows_like(x: Tensor, dim: int, fp8: bool) -> tuple[Tensor, Tensor]:
    """What `_store_row` fills: numbers, and scales if they are FP8."""
    shape = x.shape[:-1]
    out = x.new_empty(*shape, dim, dtype=FP8 if fp8 else x.dtype)
    return out, x.new_empty(*shape, 1, dtype=torch.float32) if fp8 else out


@triton.jit
def _silu_mul(gate_up, out, scales, dim, FP8: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < dim
    gate = tl.load(gate_up + token * 2 * dim + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * dim + dim + channel, mask=inside, other=0.0).to(tl.float32)
    _store_row(out, scales, token, dim, channel, inside, gate * tl.sigmoid(gate) * up, FP8)


def silu_mul(gate_up: Tensor, fp8: bool = False) -> Activation:
    """See `models.ops.PlainOps`; gate_up is (rows, tokens, 2 × dim), contiguous."""
    rows, tokens, width = gate_up.shape
    dim = width // 2
    out, scales = _rows_like(gate_up, dim, fp8)
    block = triton.next_power_of_2(dim)
    if not fp8:  # a scale takes its whole token
        block = min(2048, block)
    grid = (rows * tokens, triton.cdiv(dim, block))
    _silu_mul[grid](gate_up, out, scales, dim, FP8=fp8, BLOCK=block, num_warps=32 if fp8 else 4)
    return Quantized(out, scales) if fp8 else out


@triton.jit
def _quantize(x, out, scales, dim, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < dim
    value = tl.load(x + token * dim + channel, mask=inside, other=0.0).to(tl.float32)
    _store_row(out, scales, token, dim, channel, inside, value, True)


def quantize(x: Tensor) -> Quantized:
    """`models.quantization.quantize_rows` in one pass."""
    x = x.contiguous()
    dim = x.shape[-1]
    out, scales = _rows_like(x, dim, True)
    block = triton.next_power_of_2(dim)
    _quantize[(x.numel() // dim,)](x, out, scales, dim, BLOCK=block, num_warps=max(1, min(8, block // 512)))
    return Quantized(out, scales)


@triton.jit
def _halves(pairs):
    """Two bfloat16 in one 32-bit word, as float32: the one at the lower address, then the other."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(value):
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _pairs(low, high):
    low = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def _rotated(source, weight, cos, sin, dim, eps, at, inside, pair, some):
    """RMS norm over each head, times its weight, rotated by pairs of channels; everything in 32-bit pairs."""
    even, odd = _halves(tl.load(source + at, mask=inside, other=0))
    scale = tl.rsqrt(tl.sum(even * even + odd * odd, axis=1) / dim + eps)[:, None]
    even_weight, odd_weight = _halves(tl.load(weight + pair, mask=some, other=0))
    even = _rounded(_rounded(even * scale) * even_weight)
    odd = _rounded(_rounded(odd * scale) * odd_weight)
    return _pairs(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def _qk_norm_rope(
    qkv, q_weight, k_weight, rotary, tokens, heads, dim, eps, row_stride, rotary_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, position = token // tokens, token % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = dim // 2
    pair = tl.arange(0, HALF)[None, :]
    some = pair < half
    inside = (head < heads) & some
    at = head * half + pair
    width = heads * half
    table = rotary + row * rotary_stride + position * half + pair
    cos = tl.load(table, mask=some, other=0.0)
    sin = tl.load(table + tokens * half, mask=some, other=0.0)
    source = qkv + row * row_stride + position * 3 * width
    q = _rotated(source, q_weight, cos, sin, dim, eps, at, inside, pair, some)
    tl.store(source + at, q, mask=inside)
    k = _rotated(source + width, k_weight, cos, sin, dim, eps, at, inside, pair, some)
    tl.store(source + width + at, k, mask=inside)


def qk_norm_rope_(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rotary: Tensor) -> None:
    """Normalise and rotate the queries and keys in `qkv` (rows, tokens, 3, heads, head_dim), in place.

    Tokens of a row are contiguous, rows may lie apart. rotary: (2, tokens, head_dim / 2) float32, or with rows before.
    """
    rows, tokens, _, heads, dim = qkv.shape
    _qk_norm_rope[(rows * tokens, triton.cdiv(heads, HEADS))](
        *(tensor.view(torch.uint32) for tensor in (qkv, q_weight, k_weight)), rotary, tokens, heads, dim, eps,
        qkv.stride(0) // 2, rotary.stride(0) if rotary.ndim == 4 else 0,
        HEADS=HEADS, HALF=triton.next_power_of_2(dim // 2), num_warps=2,
    )  # fmt: skip


@triton.jit
def _norm_rotate_halves(x, weight, cos, sin, out, heads, dim, eps, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = dim // 2
    channel = tl.arange(0, HALF)[None, :]
    some = channel < half
    inside = (head < heads) & some
    at = (token * heads + head) * dim + channel
    low = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / dim + eps)[:, None]
    low *= scale * tl.load(weight + channel, mask=some, other=0.0).to(tl.float32)
    high *= scale * tl.load(weight + half + channel, mask=some, other=0.0).to(tl.float32)
    angle = token * dim + channel
    c, s = tl.load(cos + angle, mask=some, other=0.0), tl.load(sin + angle, mask=some, other=0.0)
    tl.store(out + at, (low * c - high * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + half, (high * c + low * s).to(out.dtype.element_ty), mask=inside)


def norm_rotate_halves(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS norm over the last dimension of x (tokens, heads, head_dim), then a rotation of its first half against its
    second, as language models have it: `x × cos + (-second, first) × sin`. cos and sin are (tokens, head_dim)."""
    tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    _norm_rotate_halves[(tokens, triton.cdiv(heads, HEADS))](
        x, weight, cos, sin, out, heads, dim, eps, HEADS=HEADS, HALF=triton.next_power_of_2(dim // 2), num_warps=4
    )
    return out
