"""Triton kernels that join target tokens and prefixes, which lie where their requests keep them (see `models.packed`).

Keys and values are read through addresses and lengths on the device, so a captured call serves any prefix. E4M3 ones
are dequantized as they are read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

QUERIES, PREFIX_TOKENS = 64, 64  # of a tile of attention
ALIGNMENT = tl.constexpr(16)  # bytes, of prefixes: whole allocations are aligned to more


@triton.jit
def _prefix_tile(
    address, scales, layer, length, token, inside, column, head, has_scale, width, heads, like: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Keys or values of one layer at `token` and `column`, in the type of `like`; `head` is each column's, and
    `has_scale` says where token and head are real."""
    at = layer * length.to(tl.int64) + token
    if FP8:
        source = tl.multiple_of(address.to(tl.pointer_type(tl.float8e4nv)), ALIGNMENT)  # without: a byte at a time
        scale_of = scales.to(tl.pointer_type(tl.float32))
        value = tl.load(source + at * width + column, mask=inside, other=0.0).to(tl.float32)
        value *= tl.load(scale_of + at * heads + head, mask=has_scale, other=0.0)
    else:
        source = tl.multiple_of(address.to(tl.pointer_type(like)), ALIGNMENT)  # without: two bytes at a time
        value = tl.load(source + at * width + column, mask=inside, other=0.0)
    return value.to(like)


@triton.jit
def _append_prefix(
    addresses, lengths, qkv, rows, tokens, layer, heads, dim, row_stride, gap,
    KEYS_FP8: tl.constexpr, VALUES_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int64)
    width = heads * dim
    if token < length + gap:
        column = tl.arange(0, BLOCK)
        inside = (column < width) & (token < length)  # behind the prefix: zeros
        like = qkv.dtype.element_ty
        head = column // dim
        target = qkv + row * row_stride + ((tokens + token) * 3 + 1) * width + column
        keys, key_scales = tl.load(addresses + row), tl.load(addresses + 2 * rows + row)
        values, value_scales = tl.load(addresses + rows + row), tl.load(addresses + 3 * rows + row)
        k = _prefix_tile(
            keys, key_scales, layer, length, token, inside, column, head, inside, width, heads, like, KEYS_FP8
        )
        v = _prefix_tile(
            values, value_scales, layer, length, token, inside, column, head, inside, width, heads, like, VALUES_FP8
        )
        tl.store(target, k, mask=column < width)
        tl.store(target + width, v, mask=column < width)


def append_prefix(
    addresses: Tensor, lengths: Tensor, qkv: Tensor, tokens: int, layer: int, gap: int, fp8: tuple[bool, bool]
) -> None:
    """Copy one layer of every row's prefix KV behind that row's target tokens, and `gap` slots of zeros behind it.

    addresses: (4, rows) int64, of each row's keys, values, key scales and value scales (see `models.prefix_kv`), of
    which the scales count where `fp8` says that keys or values are; lengths: (rows,) int32, their prefix tokens. qkv:
    (rows, slots, 3, heads, head_dim), contiguous; prefix and gap fit its slots behind `tokens`.
    """
    rows, slots, _, heads, dim = qkv.shape
    _append_prefix[(rows, slots - tokens)](
        addresses, lengths, qkv, rows, tokens, layer, heads, dim, qkv.stride(0), gap,
        KEYS_FP8=fp8[0], VALUES_FP8=fp8[1], BLOCK=triton.next_power_of_2(heads * dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _merge_prefix(
    qkv, attended, lse, addresses, lengths, rows, tokens, layer, heads, dim, scale,
    KEYS_FP8: tl.constexpr, VALUES_FP8: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
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
    like = qkv.dtype.element_ty
    keys, key_scales = tl.load(addresses + row), tl.load(addresses + 2 * rows + row)
    values, value_scales = tl.load(addresses + rows + row), tl.load(addresses + 3 * rows + row)
    column = head * dim + channel[None, :]
    for start in range(0, length, KEYS):
        behind = (start + tl.arange(0, KEYS))[:, None].to(tl.int64)
        is_prefix = behind < length
        some = is_prefix & (channel[None, :] < dim)
        k = _prefix_tile(
            keys, key_scales, layer, length, behind, some, column, head, is_prefix, width, heads, like, KEYS_FP8
        )
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(start + tl.arange(0, KEYS)[None, :] < length, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        shrink = tl.exp(highest - higher)
        probability = tl.exp(score - higher[:, None])
        weight = weight * shrink + tl.sum(probability, axis=1)
        v = _prefix_tile(
            values, value_scales, layer, length, behind, some, column, head, is_prefix, width, heads, like, VALUES_FP8
        )
        total = total * shrink[:, None] + tl.dot(probability.to(v.dtype), v)
        highest = higher
    tl.store(attended + at, (total / weight[:, None]).to(attended.dtype.element_ty), mask=inside)


def merge_prefix(
    qkv: Tensor, attended: Tensor, lse: Tensor, addresses: Tensor, lengths: Tensor, layer: int, fp8: tuple[bool, bool]
) -> None:
    """Let queries that have attended to their own block attend to their row's prefix as well; `attended` is updated.

    qkv: (rows, tokens, 3, heads, head_dim), contiguous, of which the queries are read; attended: (rows, tokens, heads,
    head_dim), contiguous; lse: (rows, heads, tokens) float32, the natural log-sum-exp of the scores so far; addresses,
    lengths and fp8 as in `append_prefix`.
    """
    rows, tokens, _, heads, dim = qkv.shape
    _merge_prefix[(triton.cdiv(tokens, QUERIES), rows * heads)](
        qkv, attended, lse, addresses, lengths, rows, tokens, layer, heads, dim, dim**-0.5,
        KEYS_FP8=fp8[0], VALUES_FP8=fp8[1],
        QUERIES=QUERIES, KEYS=PREFIX_TOKENS, DIM=max(16, triton.next_power_of_2(dim)), num_warps=4,
    )  # fmt: skip
