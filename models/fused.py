"""The transformer's operations on CUDA in bfloat16: Triton kernels, and the fastest attention that is installed.

Two ways to attend from target tokens to a prefix whose length is known only on the device, so that one captured step
serves every prompt:

- FlashAttention-3, where the optional package is there and the GPU is a Hopper: every row's target keys with its
  prefix behind them, in one buffer that each layer fills anew. The order of keys does not matter to a softmax, and with
  the prefix last its true length is simply the end of the row.
- Otherwise two parts: torch's own attention over the target block, which also returns its log-sum-exp, and a kernel
  that goes on from there over the prefix where it lies.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from models import kernels
from models.attention import attention
from models.ops import QKNorm
from models.packed import GAP, PackedRows
from models.transformer import Attention

FLASH_3 = "fa3_fwd_interface"
FLASH_3_HEAD_DIMS = (64, 128)
HOPPER = (9, 0)
SHORT = 512  # queries below which choosing an attention costs more than it gains


class DecodeAttention(Protocol):
    """The attention of a decode step over packed rows."""

    def capacity(self, longest_prefix: int) -> int:
        """Slots behind each row's target keys, for prefixes of up to `longest_prefix` tokens. Few different ones."""

    def __call__(self, rows: PackedRows, layer: int, attn: Attention, x: Tensor) -> Tensor:
        """`models.transformer.Attend` over the prefixes of `rows`."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """`models.ops.Ops` of one device."""

    attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    decode_attention: DecodeAttention

    norm_modulate = staticmethod(kernels.norm_modulate)
    add_norm_modulate = staticmethod(kernels.add_norm_modulate)
    silu_mul = staticmethod(kernels.silu_mul)

    @classmethod
    def of(cls, device: torch.device, head_dim: int) -> Self:
        """The operations for a device, with the fastest attention that is installed for it."""
        is_hopper = torch.cuda.get_device_capability(device) == HOPPER
        if is_hopper and head_dim in FLASH_3_HEAD_DIMS and importlib.util.find_spec(FLASH_3) is not None:
            return cls(_flash_3_attention, Flash3Attention())
        backend = SDPBackend.CUDNN_ATTENTION if is_hopper else SDPBackend.FLASH_ATTENTION
        return cls(_pinned(backend), TwoPartAttention(backend))

    def store_qkv(self, qkv: Tensor, norm: QKNorm, rotary: Tensor, kv: Tensor) -> Tensor:
        _, tokens, heads, head_dim = kv.shape
        split = qkv.view(1, tokens, 3, heads, head_dim)
        kernels.qk_norm_rope_(split, norm.q_weight, norm.k_weight, norm.eps, rotary)
        kv.copy_(split[0, :, 1:].transpose(0, 1))
        return split[:, :, 0]


class Flash3Attention:
    """Target keys and prefix in one buffer."""

    def capacity(self, longest_prefix: int) -> int:
        capacity = 1024
        while capacity < longest_prefix:
            capacity *= 2
        return capacity + GAP

    def __call__(self, rows: PackedRows, layer: int, attn: Attention, x: Tensor) -> Tensor:
        from fa3_fwd_interface import flash_attn_with_kvcache

        q = _project(rows, attn, x)[:, :, 0]
        kernels.append_prefix(rows.addresses, rows.prefix_lens, rows.qkv, rows.tokens, layer, GAP)
        keys, values = rows.qkv[:, :, 1], rows.qkv[:, :, 2]
        attended: Tensor = flash_attn_with_kvcache(q, keys, values, cache_seqlens=rows.key_lens, num_splits=1)
        return attended.flatten(2)


class TwoPartAttention:
    """Target block first, then on from its log-sum-exp over the prefix where it lies."""

    def __init__(self, backend: SDPBackend) -> None:
        self._backend = backend

    def capacity(self, longest_prefix: int) -> int:
        return 0

    def __call__(self, rows: PackedRows, layer: int, attn: Attention, x: Tensor) -> Tensor:
        qkv = _project(rows, attn, x)
        heads_first = [part.transpose(1, 2) for part in qkv.unbind(2)]
        if self._backend is SDPBackend.CUDNN_ATTENTION:
            attended, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads_first, None, True)
        else:
            attended, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first)
        attended = attended.transpose(1, 2).contiguous()
        lse = lse.reshape(*attended.shape[::2], rows.tokens).contiguous()
        kernels.merge_prefix(qkv, attended, lse, rows.addresses, rows.prefix_lens, layer)
        return attended.flatten(2)


def _project(rows: PackedRows, attn: Attention, x: Tensor) -> Tensor:
    """Normalised and rotated projections, in their slots: (rows, tokens, 3, heads, head_dim)."""
    qkv = rows.project(x, attn.to_qkv.weight)
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
