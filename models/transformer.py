"""The single-stream transformer of Qwen-Image-2.1, split the way it is served: prefill once, decode every step.

`prefill` runs text and condition-image tokens alone and keeps their keys and values. `decode` runs target tokens only,
against them. This is exact: the sequence is causal, and with `causal_condition` prefix tokens are modulated from t = 0,
so nothing in them depends on the step or on the target. One modulation projection serves every block, so scales
`1 + scale` and gates `tanh(gate)` are computed once a step.

Checkpoints publish separate q, k, v and gate, up projections; `published_names` says how they are stacked at load.
Oracle: `QwenImage21Transformer2DModel` of diffusers 0.42.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention, block_causal_attention, target_attention
from models.config import TransformerConfig
from models.layout import PrefixLayout
from models.prefix_kv import EmbeddedPrefix, Prefix, PrefixKV
from models.rope import apply_rotary, prefix_table

TIMESTEP_CHANNELS = 256
TIMESTEP_MAX_PERIOD = 10000.0
TIMESTEP_SCALE = 1000.0

# How our parameter names read in a published checkpoint: by prefix, and, for stacked projections, by suffix.
RENAMED = {
    "blocks.": "transformer_blocks.",
    "timestep_embedder.": "time_text_embed.timestep_embedder.",
    "out_scale.": "norm_out.linear.",
}
PACKED = {
    "attn.to_qkv.weight": ("attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight"),
    "attn.to_out.weight": ("attn.to_out.0.weight",),
    "mlp.gate_up.weight": ("img_mlp.gate_layer.weight", "img_mlp.proj.weight"),
    "mlp.down.weight": ("img_mlp.out.weight",),
}


def published_names(name: str) -> tuple[str, ...]:
    """The published tensors that our parameter `name` is stacked from, in order."""
    for ours, theirs in RENAMED.items():
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    for ours, parts in PACKED.items():
        if name.endswith(ours):
            return tuple(name.removesuffix(ours) + part for part in parts)
    return (name,)


@dataclass(frozen=True, slots=True)
class Modulation:
    """What one timestep does to tokens: each is (rows, 1, inner_dim). Scales already hold `1 +`, gates their tanh."""

    attn_scale: Tensor
    attn_gate: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor
    out_scale: Tensor


class QKNorm(nn.Module):
    """RMS norm over a head's channels. The normalised value is rounded to the working dtype before the weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(variance + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Packed q/k/v projection, q/k norm and rotation; the caller supplies the attention itself."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.to_qkv = nn.Linear(config.inner_dim, 3 * config.inner_dim, bias=False)
        self.to_out = nn.Linear(config.inner_dim, config.inner_dim, bias=False)
        self.norm_q = QKNorm(self.head_dim, config.eps)
        self.norm_k = QKNorm(self.head_dim, config.eps)

    def project(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # each (rows, tokens, heads, dim)
        q, k, v = self.to_qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        return apply_rotary(self.norm_q(q), rotary), apply_rotary(self.norm_k(k), rotary), v


class SwiGLU(nn.Module):
    """Feed-forward with packed gate and up projections."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * dim * ratio, bias=False)
        self.down = nn.Linear(dim * ratio, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One transformer block. It holds no modulation of its own."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.inner_dim, eps=config.eps, elementwise_affine=False)
        self.attn = Attention(config)
        self.mlp = SwiGLU(config.inner_dim, config.mlp_ratio)

    def project(self, hidden: Tensor, modulation: Modulation, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attn.project(self.norm(hidden) * modulation.attn_scale, rotary)

    def finish(self, hidden: Tensor, attended: Tensor, modulation: Modulation) -> Tensor:
        """Everything behind the attention: output projection, gated residual, feed-forward, gated residual."""
        hidden = hidden + modulation.attn_gate * self.attn.to_out(attended.flatten(2))
        return hidden + modulation.mlp_gate * self.mlp(self.norm(hidden) * modulation.mlp_scale)


class TimestepEmbedder(nn.Module):
    """Sinusoidal embedding of t in [0, 1], cosines first, then a two-layer projection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIMESTEP_CHANNELS, dim, bias=False)
        self.linear_2 = nn.Linear(dim, dim, bias=False)

    def forward(self, timestep: Tensor) -> Tensor:  # (rows,) float32 -> (rows, dim)
        half = TIMESTEP_CHANNELS // 2
        steps = torch.arange(half, dtype=torch.float32, device=timestep.device)
        frequencies = torch.exp(-math.log(TIMESTEP_MAX_PERIOD) * steps / half)
        angles = (TIMESTEP_SCALE * timestep)[:, None] * frequencies
        embedding = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(embedding)))


class ZeroCentredRMSNorm(nn.Module):
    """RMS norm that stores its weight minus one and works in float32 throughout."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (self.weight.float() + 1)).to(x.dtype)


class TextProjection(nn.Module):
    """Prompt embeddings to transformer width."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.text_norm = ZeroCentredRMSNorm(config.context_in_dim, config.eps)
        self.in_layer = nn.Linear(config.context_in_dim, config.inner_dim, bias=False)
        self.out_layer = nn.Linear(config.inner_dim, config.inner_dim, bias=False)

    def forward(self, embeds: Tensor) -> Tensor:
        hidden = F.gelu(self.in_layer(self.text_norm(embeds)), approximate="tanh")
        return self.out_layer(hidden)


class Transformer(nn.Module):
    """The whole network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.img_in = nn.Linear(config.in_channels, dim, bias=False)
        self.txt_in = TextProjection(config)
        self.timestep_embedder = TimestepEmbedder(dim)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 4 * dim, bias=False))
        self.blocks: list[Block] = nn.ModuleList([Block(config) for _ in range(config.num_layers)])  # type: ignore[assignment]
        self.out_scale = nn.Linear(dim, dim, bias=False)
        self.out_norm = nn.LayerNorm(dim, eps=config.eps, elementwise_affine=False)
        self.proj_out = nn.Linear(dim, config.in_channels, bias=False)

    def modulate(self, timestep: Tensor) -> Modulation:
        """The modulation of `timestep` (rows,) float32 in [0, 1]."""
        embedding = self.timestep_embedder(timestep)
        attn_scale, attn_gate, mlp_scale, mlp_gate = self.modulation(embedding).unsqueeze(1).chunk(4, dim=-1)
        out_scale = self.out_scale(F.silu(embedding)).unsqueeze(1)
        return Modulation(1 + attn_scale, attn_gate.tanh(), 1 + mlp_scale, mlp_gate.tanh(), 1 + out_scale)

    def embed_prefix(self, prompt_embeds: Tensor, condition_latents: Sequence[Tensor], layout: PrefixLayout) -> Tensor:
        """Text and condition-image tokens in sequence order: (1, prefix tokens, inner_dim).

        `prompt_embeds` is (text tokens, context_in_dim), image slots left out; `condition_latents` holds one
        (tokens, channels) per image, in raster order.
        """
        text = self.txt_in(prompt_embeds)
        images = iter(condition_latents)
        parts, taken = [], 0
        for segment in layout.segments:
            if segment.grid is None:
                parts.append(text[taken : taken + segment.num_tokens])
                taken += segment.num_tokens
            else:
                parts.append(self.img_in(next(images)))
        return torch.cat(parts).unsqueeze(0)

    def prefill(self, prompt_embeds: Tensor, condition_latents: Sequence[Tensor], layout: PrefixLayout) -> Prefix:
        """Run the prefix of one CFG branch once; arguments as in `embed_prefix`."""
        hidden = self.embed_prefix(prompt_embeds, condition_latents, layout)
        rotary = prefix_table(layout, self.config.axes_dims_rope).to(hidden.device)
        if not self.config.causal_condition:
            return EmbeddedPrefix(layout, hidden, rotary)
        modulation = self.modulate(torch.zeros(1, device=hidden.device))
        heads, head_dim = self.config.num_attention_heads, self.config.attention_head_dim
        kv = hidden.new_empty(len(self.blocks), 2, layout.prefix_len_tokens, heads, head_dim)
        for layer, block in enumerate(self.blocks):
            q, k, v = block.project(hidden, modulation, rotary)
            kv[layer, 0], kv[layer, 1] = k[0], v[0]
            if layer + 1 < len(self.blocks):  # nothing reads the last block's prefix output
                hidden = block.finish(hidden, block_causal_attention(q, k, v, layout.segments), modulation)
        return PrefixKV(layout, kv)

    def decode(self, latents: Tensor, timestep: Tensor, rotary: Tensor, prefixes: Sequence[Prefix]) -> Tensor:
        """Predicted velocity of the target tokens of every row: (rows, tokens, channels).

        latents: (rows, tokens, channels); timestep: (rows,) float32 in [0, 1]; rotary: (rows, 2, tokens,
        head_dim / 2); prefixes: one per row, of any lengths.
        """
        if not self.config.causal_condition:
            rows = [
                self._decode_jointly(latents[row : row + 1], timestep[row : row + 1], rotary[row], prefix)
                for row, prefix in enumerate(prefixes)
                if isinstance(prefix, EmbeddedPrefix)
            ]
            return torch.cat(rows)
        kv = [prefix.kv for prefix in prefixes if isinstance(prefix, PrefixKV)]
        modulation = self.modulate(timestep)
        hidden = self.img_in(latents)
        for layer, block in enumerate(self.blocks):
            q, k, v = block.project(hidden, modulation, rotary)
            attended = target_attention(q, k, v, [row[layer] for row in kv])
            hidden = block.finish(hidden, attended, modulation)
        return self._velocity(hidden, modulation)

    def _decode_jointly(self, latents: Tensor, timestep: Tensor, rotary: Tensor, prefix: EmbeddedPrefix) -> Tensor:
        """One row over prefix and target together, every token at the real timestep."""
        prefix_len = prefix.layout.prefix_len_tokens
        hidden = torch.cat([prefix.hidden, self.img_in(latents)], dim=1)
        table = torch.cat([prefix.rotary, rotary], dim=1)
        modulation = self.modulate(timestep)
        for block in self.blocks:
            q, k, v = block.project(hidden, modulation, table)
            of_prefix = block_causal_attention(q[:, :prefix_len], k, v, prefix.layout.segments)
            of_target = attention(q[:, prefix_len:], k, v)
            hidden = block.finish(hidden, torch.cat([of_prefix, of_target], dim=1), modulation)
        return self._velocity(hidden[:, prefix_len:], modulation)

    def _velocity(self, hidden: Tensor, modulation: Modulation) -> Tensor:
        return self.proj_out(self.out_norm(hidden) * modulation.out_scale)
