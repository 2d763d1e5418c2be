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
from models.quantization import Activation, Quantized, quantize_rows
from models.rope import apply_rotary


class Ops(Protocol):
    """The operations that have a plain and a fused form; `PlainOps` says what each of them is."""

    def norm_modulate(self, x: Tensor, scale: Tensor, eps: float, fp8: bool = False) -> Activation: ...

    def add_norm_modulate(
        self, x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, eps: float, fp8: bool = False
    ) -> tuple[Tensor, Activation]: ...

    def silu_mul(self, gate_up: Tensor, fp8: bool = False) -> Activation: ...

    def quantize(self, x: Tensor) -> Quantized: ...

    def split_qkv(self, qkv: Tensor, norm: QKNorm, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

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


class PlainOps:
    """Plain torch. Where `fp8` is true the result that a matrix product reads next is quantized."""

    def norm_modulate(self, x: Tensor, scale: Tensor, eps: float, fp8: bool = False) -> Activation:
        """Layer norm without weights over the last dimension of (rows, tokens, dim), times `scale` (rows, 1, dim)."""
        normed = F.layer_norm(x, x.shape[-1:], eps=eps) * scale
        return quantize_rows(normed) if fp8 else normed

    def add_norm_modulate(
        self, x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, eps: float, fp8: bool = False
    ) -> tuple[Tensor, Activation]:
        """The gated residual `x + gate × branch`, and `norm_modulate` of it. May reuse the memory of `x`."""
        x = x + gate * branch
        return x, self.norm_modulate(x, scale, eps, fp8)

    def silu_mul(self, gate_up: Tensor, fp8: bool = False) -> Activation:
        """SiLU of the first half of the last dimension, times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        product = F.silu(gate) * up
        return quantize_rows(product) if fp8 else product

    def quantize(self, x: Tensor) -> Quantized:
        """See `models.quantization.quantize_rows`."""
        return quantize_rows(x)

    def split_qkv(self, qkv: Tensor, norm: QKNorm, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (rows, tokens, heads, head_dim), the first two normalised and rotated, from
        packed projections (rows, tokens, 3 × heads × head_dim), whose memory may be reused."""
        q, k, v = qkv.unflatten(-1, (3, -1, norm.q_weight.shape[0])).unbind(2)
        q, k = qk_norm(q, norm.q_weight, norm.eps), qk_norm(k, norm.k_weight, norm.eps)
        return apply_rotary(q, rotary), apply_rotary(k, rotary), v

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """See `models.attention.attention`."""
        return attention(q, k, v, causal)


PLAIN = PlainOps()
