"""What stands between the matrix products of the transformer.

`PlainOps` is plain torch, on any device and in any dtype. `models.fused.FusedOps` does the same in fewer passes over
memory, on CUDA and in bfloat16.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import attention
from models.rope import apply_rotary


class Ops(Protocol):
    """The operations that have a plain and a fused form; `PlainOps` says what each of them is."""

    def norm_modulate(self, x: Tensor, scale: Tensor, eps: float) -> Tensor: ...

    def add_norm_modulate(
        self, x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def store_qkv(self, qkv: Tensor, norm: QKNorm, rotary: Tensor, kv: Tensor) -> Tensor: ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor: ...


class QKNorm(Protocol):
    """The weights of a layer's norms over the channels of each query and key."""

    @property
    def q_weight(self) -> Tensor: ...

    @property
    def k_weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


def qk_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension. The result is rounded to the working dtype before the weight."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(variance + eps)).to(x.dtype) * weight


def split_qkv(qkv: Tensor, norm: QKNorm, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (rows, tokens, heads, head_dim), the first two normalised and rotated, from packed
    projections (rows, tokens, 3 × heads × head_dim)."""
    q, k, v = qkv.unflatten(-1, (3, -1, norm.q_weight.shape[0])).unbind(2)
    q, k = qk_norm(q, norm.q_weight, norm.eps), qk_norm(k, norm.k_weight, norm.eps)
    return apply_rotary(q, rotary), apply_rotary(k, rotary), v


class PlainOps:
    """Plain torch."""

    def norm_modulate(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Layer norm without weights over the last dimension of (rows, tokens, dim), times `scale` (rows, 1, dim)."""
        return F.layer_norm(x, x.shape[-1:], eps=eps) * scale

    def add_norm_modulate(
        self, x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The gated residual `x + gate × branch`, and `norm_modulate` of it. May reuse the memory of `x`."""
        x = x + gate * branch
        return x, self.norm_modulate(x, scale, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of the last dimension, times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def store_qkv(self, qkv: Tensor, norm: QKNorm, rotary: Tensor, kv: Tensor) -> Tensor:
        """`split_qkv` of one row: returns the queries; keys and values go to `kv` (2, tokens, heads, head_dim)."""
        q, k, v = split_qkv(qkv, norm, rotary)
        kv.copy_(torch.cat([k, v]))
        return q

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """See `models.attention.attention`."""
        return attention(q, k, v, causal)


PLAIN = PlainOps()
