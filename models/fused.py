"""The transformer's operations on CUDA in bfloat16: Triton kernels, and the fastest attention that is installed.

Two ways to attend from target tokens to a prefix whose length is known only on the device, so that one captured step
serves every prompt:

- In two parts: the target block alone, with its log-sum-exp, and a kernel that goes on from there over the prefix where
  it lies. The block's part knows its length, so any attention does for it.
- In one buffer: every row's target keys with its prefix behind them, filled anew by each layer. The order of keys does
  not matter to a softmax, and with the prefix last its true length is simply the end of the row. FlashAttention-3 takes
  such lengths; it is an optional package for Hoppers, and there the faster way for long prefixes and few targets.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from models import kernels, prefix_kernels
from models.attention import attention
from models.ops import QKNorm
from models.packed import GAP, PackedRows
from models.quantization import Activation
from models.transformer import Attention

FLASH_3 = "fa3_fwd_interface"
FLASH_3_HEAD_DIMS = (64, 128)
HOPPER = (9, 0)
MANY_TOKENS, SHORT_PREFIX = 4096, 1024  # where FlashAttention-3 is faster in two parts
SHORT = 512  # queries below which choosing an attention costs more than it gains


class DecodeAttention(Protocol):
    """The attention of a decode step over packed rows."""

    def capacity(self, tokens: int, longest_prefix: int) -> int:
        """Slots behind the keys of a row's target `tokens`, for prefixes of up to `longest_prefix` tokens. Few
        different ones."""

    def __call__(self, rows: PackedRows, layer: int, attn: Attention, x: Activation) -> Tensor:
        """`models.transformer.Attend` over the prefixes of `rows`."""


BlockAttention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention of a block over itself: from q, k, v (rows, tokens, heads, head_dim) to what was attended to, contiguous,
and the natural log-sum-exp of the scores, (rows, heads, tokens) float32."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """`models.ops.Ops` of one device."""

    attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    decode_attention: DecodeAttention

    norm_modulate = staticmethod(kernels.norm_modulate)
    add_norm_modulate = staticmethod(kernels.add_norm_modulate)
    silu_mul = staticmethod(kernels.silu_mul)
    quantize = staticmethod(kernels.quantize)

    @classmethod
    def of(cls, device: torch.device, head_dim: int) -> Self:
        """The operations for a device, with the fastest attention that is installed for it."""
        is_hopper = torch.cuda.get_device_capability(device) == HOPPER
        if is_hopper and head_dim in FLASH_3_HEAD_DIMS and importlib.util.find_spec(FLASH_3) is not None:
            return cls(_flash_3_attention, Flash3Attention())
        if is_hopper:
            return cls(_pinned(SDPBackend.CUDNN_ATTENTION), TwoPartAttention(cudnn_block))
        return cls(_pinned(SDPBackend.FLASH_ATTENTION), TwoPartAttention(flash_block))

    def split_qkv(self, qkv: Tensor, norm: QKNorm, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = qkv.unflatten(-1, (3, -1, norm.q_weight.shape[0]))
        kernels.qk_norm_rope_(split, norm.q_weight, norm.k_weight, norm.eps, rotary)
        q, k, v = split.unbind(2)
        return q, k, v


class TwoPartAttention:
    """Target block first, then on from its log-sum-exp over the prefix where it lies."""

    def __init__(self, block: BlockAttention) -> None:
        self._block = block

    def capacity(self, tokens: int, longest_prefix: int) -> int:
        return 0

    def __call__(self, rows: PackedRows, layer: int, attn: Attention, x: Activation) -> Tensor:
        qkv = _project(rows, attn, x)
        attended, lse = self._block(*qkv.unbind(2))
        prefix_kernels.merge_prefix(qkv, attended, lse, rows.addresses, rows.prefix_lens, layer, rows.fp8)
        return attended.flatten(2)


class Flash3Attention:
    """In two parts for many targets and a short prefix, else in one buffer."""

    def __init__(self) -> None:
        self._two_parts = TwoPartAttention(flash_3_block)

    def capacity(self, tokens: int, longest_prefix: int) -> int:
        if tokens >= MANY_TOKENS and longest_prefix <= SHORT_PREFIX:
            return 0
        capacity = 1024
        while capacity < longest_prefix:
            capacity *= 2
        return capacity + GAP

    def __call__(self, rows: PackedRows, layer: int, attn: Attention, x: Activation) -> Tensor:
        if rows.capacity == 0:
            return self._two_parts(rows, layer, attn, x)
        from fa3_fwd_interface import flash_attn_with_kvcache

        q = _project(rows, attn, x)[:, :, 0]
        prefix_kernels.append_prefix(rows.addresses, rows.prefix_lens, rows.qkv, rows.tokens, layer, GAP, rows.fp8)
        keys, values = rows.qkv[:, :, 1], rows.qkv[:, :, 2]
        attended: Tensor = flash_attn_with_kvcache(q, keys, values, cache_seqlens=rows.key_lens, num_splits=1)
        return attended.flatten(2)


def flash_3_block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from fa3_fwd_interface import flash_attn_func

    attended, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    return attended, lse


def cudnn_block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    heads_first = [part.transpose(1, 2) for part in (q, k, v)]
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads_first, None, True)
    return attended.transpose(1, 2).contiguous(), lse.reshape(*lse.shape[:3]).contiguous()


def flash_block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    heads_first = [part.transpose(1, 2) for part in (q, k, v)]
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first)
    return attended.transpose(1, 2).contiguous(), lse.contiguous()


def _project(rows: PackedRows, attn: Attention, x: Activation) -> Tensor:
    """Normalised and rotated projections, in their slots: (rows, tokens, 3, heads, head_dim)."""
    qkv = rows.project(x, attn.to_qkv)
    kernels.qk_norm_rope_(qkv, attn.q_weight, attn.k_weight, attn.eps, rows.rotary)
    return qkv


def _flash_3_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from fa3_fwd_interface import flash_attn_func

    if q.shape[1] < SHORT:
        return attention(q, k, v, causal)
    attended: Tensor = flash_attn_func(q, k, v, causal=causal)  # its triangle ends at the last key, as ours does
    return attended


def _pinned(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if q.shape[1] < SHORT:
            return attention(q, k, v, causal)
        order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(order if causal else [backend, *order], set_priority=True):
            return attention(q, k, v, causal)

    return attend
