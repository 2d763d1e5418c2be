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

HEADS = 8  # a program
QUERIES, PREFIX_TOKENS = 128, 64  # of a tile of attention


@triton.jit
def _norm_modulate(x, branch, gate, scale, hidden, normed, tokens, dim, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
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
    tl.store(normed + token * dim + channel, centred.to(normed.dtype.element_ty), mask=inside)


def norm_modulate(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See `models.ops.PlainOps`; x is (rows, tokens, dim), contiguous, scale (rows, 1, dim)."""
    rows, tokens, dim = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(dim)
    _norm_modulate[(rows * tokens,)](
        x, x, x, scale.contiguous(), x, normed, tokens, dim, eps, ADD=False, BLOCK=block, num_warps=8
    )
    return normed


def add_norm_modulate(x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `models.ops.PlainOps`. `x` is overwritten by the sum."""
    rows, tokens, dim = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(dim)
    _norm_modulate[(rows * tokens,)](
        x, branch, gate.contiguous(), scale.contiguous(), x, normed, tokens, dim, eps,
        ADD=True, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return x, normed


@triton.jit
def _silu_mul(gate_up, out, dim, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < dim
    gate = tl.load(gate_up + token * 2 * dim + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * dim + dim + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * dim + channel, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `models.ops.PlainOps`; gate_up is (rows, tokens, 2 × dim), contiguous."""
    rows, tokens, width = gate_up.shape
    dim = width // 2
    out = gate_up.new_empty(rows, tokens, dim)
    block = min(2048, triton.next_power_of_2(dim))
    _silu_mul[(rows * tokens, triton.cdiv(dim, block))](gate_up, out, dim, BLOCK=block, num_warps=4)
    return out


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


@triton.jit
def _append_prefix(addresses, lengths, qkv, tokens, layer, width, row_stride, gap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    if token < length + gap:
        channel = tl.arange(0, BLOCK)
        inside = (channel < width) & (token < length)  # behind the prefix: zeros
        prefix = tl.load(addresses + row).to(tl.pointer_type(qkv.dtype.element_ty))
        prefix += (2 * layer * length + token) * width + channel
        key = qkv + row * row_stride + ((tokens + token) * 3 + 1) * width + channel
        tl.store(key, tl.load(prefix, mask=inside, other=0.0), mask=channel < width)
        tl.store(key + width, tl.load(prefix + length * width, mask=inside, other=0.0), mask=channel < width)


def append_prefix(addresses: Tensor, lengths: Tensor, qkv: Tensor, tokens: int, layer: int, gap: int) -> None:
    """Copy one layer of every row's prefix KV behind that row's target tokens, and `gap` slots of zeros behind it.

    addresses: (rows,) int64, of contiguous (layers, 2, prefix tokens, heads, head_dim) tensors; lengths: (rows,) int32,
    their prefix tokens. qkv: (rows, slots, 3, heads, head_dim), contiguous; prefix and gap fit its slots behind
    `tokens`. Lengths and addresses are read on the device, so a captured call serves any prefix.
    """
    rows, slots, _, heads, dim = qkv.shape
    _append_prefix[(rows, slots - tokens)](
        addresses, lengths, qkv, tokens, layer, heads * dim, qkv.stride(0), gap,
        BLOCK=triton.next_power_of_2(heads * dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _merge_prefix(
    qkv, attended, lse, addresses, lengths, tokens, layer, heads, dim, scale,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, DIM)
    width = heads * dim
    token = row.to(tl.int64) * tokens + query[:, None]
    at = token * width + head * dim + channel[None, :]
    inside = (query[:, None] < tokens) & (channel[None, :] < dim)
    q = tl.load(qkv + token * 3 * width + head * dim + channel[None, :], mask=inside, other=0.0)
    total = tl.load(attended + at, mask=inside, other=0.0).to(tl.float32)
    highest = tl.load(lse + (row.to(tl.int64) * heads + head) * tokens + query, mask=query < tokens, other=0.0)
    weight = tl.full([QUERIES], 1.0, tl.float32)
    length = tl.load(lengths + row)
    keys = tl.load(addresses + row).to(tl.pointer_type(qkv.dtype.element_ty))
    keys += 2 * layer * length.to(tl.int64) * width + head * dim
    values = keys + length.to(tl.int64) * width
    for start in range(0, length, KEYS):
        behind = start + tl.arange(0, KEYS)
        some = (behind[:, None] < length) & (channel[None, :] < dim)
        offset = behind[:, None].to(tl.int64) * width + channel[None, :]
        k = tl.load(keys + offset, mask=some, other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(behind[None, :] < length, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        shrink = tl.exp(highest - higher)
        probability = tl.exp(score - higher[:, None])
        weight = weight * shrink + tl.sum(probability, axis=1)
        v = tl.load(values + offset, mask=some, other=0.0)
        total = total * shrink[:, None] + tl.dot(probability.to(v.dtype), v)
        highest = higher
    tl.store(attended + at, (total / weight[:, None]).to(attended.dtype.element_ty), mask=inside)


def merge_prefix(qkv: Tensor, attended: Tensor, lse: Tensor, addresses: Tensor, lengths: Tensor, layer: int) -> None:
    """Let queries that have attended to their own block attend to their row's prefix as well; `attended` is updated.

    qkv: (rows, tokens, 3, heads, head_dim), contiguous, of which the queries are read; attended: (rows, tokens, heads,
    head_dim), contiguous; lse: (rows, heads, tokens) float32, the natural log-sum-exp of the scores so far; addresses
    and lengths as in `append_prefix`.
    """
    rows, tokens, _, heads, dim = qkv.shape
    _merge_prefix[(triton.cdiv(tokens, QUERIES), rows * heads)](
        qkv, attended, lse, addresses, lengths, tokens, layer, heads, dim, dim**-0.5,
        QUERIES=QUERIES, KEYS=PREFIX_TOKENS, DIM=max(16, triton.next_power_of_2(dim)), num_warps=8,
    )  # fmt: skip
