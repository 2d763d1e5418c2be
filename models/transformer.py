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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import attention, block_causal_attention, target_attention
from models.config import TransformerConfig
from models.layout import PrefixLayout
from models.ops import PLAIN, Ops
from models.prefix_kv import EmbeddedPrefix, Prefix, PrefixKV
from models.quantization import Activation, takes_fp8
from models.rope import prefix_table

BLOCKS = "blocks"
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
    "attn.q_weight": ("attn.norm_q.weight",),
    "attn.k_weight": ("attn.norm_k.weight",),
    "mlp.gate_up.weight": ("img_mlp.gate_layer.weight", "img_mlp.proj.weight"),
    "mlp.down.weight": ("img_mlp.out.weight",),
}


PublishedNames = Callable[[str], tuple[str, ...]]


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


class Attention(nn.Module):
    """The weights of packed q/k/v projection, q/k norm and output projection; the attention itself is the caller's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.to_qkv = nn.Linear(config.inner_dim, 3 * config.inner_dim, bias=False)
        self.to_out = nn.Linear(config.inner_dim, config.inner_dim, bias=False)
        self.q_weight = nn.Parameter(torch.ones(config.attention_head_dim))
        self.k_weight = nn.Parameter(torch.ones(config.attention_head_dim))


class SwiGLU(nn.Module):
    """Feed-forward with packed gate and up projections."""

    def __init__(self, dim: int, ratio: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up = nn.Linear(dim, 2 * dim * ratio, bias=False)
        self.down = nn.Linear(dim * ratio, dim, bias=False)

    def forward(self, x: Activation) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x), takes_fp8(self.down)))


class Block(nn.Module):
    """The weights of one transformer block. It holds no modulation of its own."""

    def __init__(self, config: TransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.mlp = SwiGLU(config.inner_dim, config.mlp_ratio, ops)


Attend = Callable[[int, Attention, Activation], Tensor | None]
"""The attention of one phase: from a layer's number, its weights and its normed input to what its queries attended to,
both (rows, tokens, inner_dim). None ends the run: nobody needs what follows."""


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
    """The whole network. `ops` are its elementwise operations, plain or fused."""

    def __init__(self, config: TransformerConfig, ops: Ops = PLAIN) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        dim = config.inner_dim
        self.img_in = nn.Linear(config.in_channels, dim, bias=False)
        self.txt_in = TextProjection(config)
        self.timestep_embedder = TimestepEmbedder(dim)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 4 * dim, bias=False))
        self.blocks: list[Block] = nn.ModuleList([Block(config, ops) for _ in range(config.num_layers)])  # type: ignore[assignment]
        self.in_order: Callable[[Iterable[Block]], Iterable[Block]] = iter  # unless their weights are streamed
        self.out_scale = nn.Linear(dim, dim, bias=False)
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

    def prefill(
        self,
        prompt_embeds: Tensor,
        condition_latents: Sequence[Tensor],
        layout: PrefixLayout,
        kv_fp8: tuple[bool, bool] = (False, False),
    ) -> Prefix:
        """Run the prefix of one CFG branch once; arguments as in `embed_prefix`. `kv_fp8`: see `KV_FORMATS`."""
        hidden = self.embed_prefix(prompt_embeds, condition_latents, layout)
        rotary = prefix_table(layout, self.config.axes_dims_rope).to(hidden.device)
        if not self.config.causal_condition:
            return EmbeddedPrefix(layout, hidden, rotary)
        kv = PrefixKV.allocate(layout, self.config, hidden, kv_fp8)
        self.fill(kv, hidden, rotary)
        return kv

    def fill(self, kv: PrefixKV, hidden: Tensor, rotary: Tensor) -> None:
        """Run embedded prefix tokens (1, prefix tokens, inner_dim), and keep their keys and values in `kv`. rotary: (2,
        prefix tokens, head_dim / 2)."""

        def attend(layer: int, attn: Attention, x: Activation) -> Tensor | None:
            q, k, v = self.ops.split_qkv(attn.to_qkv(x), attn, rotary)
            kv.write(layer, k, v, self.ops.quantize)
            if layer + 1 == len(self.blocks):  # nothing reads the last block's prefix output
                return None
            return block_causal_attention(q, k, v, kv.layout.segments, self.ops.attention).flatten(2)

        self._run(hidden, self.modulate(torch.zeros(1, device=hidden.device)), attend)

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
        kept = [prefix for prefix in prefixes if isinstance(prefix, PrefixKV)]

        def attend(layer: int, attn: Attention, x: Activation) -> Tensor:
            q, k, v = PLAIN.split_qkv(attn.to_qkv(x), attn, rotary)
            return target_attention(q, k, v, [kv.read(layer, k.dtype) for kv in kept]).flatten(2)

        return self.velocity(latents, timestep, attend)

    def velocity(self, latents: Tensor, timestep: Tensor, attend: Attend) -> Tensor:
        """`decode` with the attention left to the caller, who holds the prefixes."""
        normed = self._run(self.img_in(latents), self.modulate(timestep), attend)
        return self.proj_out(normed)

    def _decode_jointly(self, latents: Tensor, timestep: Tensor, rotary: Tensor, prefix: EmbeddedPrefix) -> Tensor:
        """One row over prefix and target together, every token at the real timestep."""
        prefix_len = prefix.layout.prefix_len_tokens
        table = torch.cat([prefix.rotary, rotary], dim=1)

        def attend(layer: int, attn: Attention, x: Activation) -> Tensor:
            q, k, v = PLAIN.split_qkv(attn.to_qkv(x), attn, table)
            of_prefix = block_causal_attention(q[:, :prefix_len], k, v, prefix.layout.segments)
            return torch.cat([of_prefix, attention(q[:, prefix_len:], k, v)], dim=1).flatten(2)

        hidden = torch.cat([prefix.hidden, self.img_in(latents)], dim=1)
        normed = self._run(hidden, self.modulate(timestep), attend)
        assert isinstance(normed, Tensor)  # what follows the last block is not quantized
        return self.proj_out(normed[:, prefix_len:])

    def _run(self, hidden: Tensor, modulation: Modulation, attend: Attend) -> Activation:
        """All blocks, and the last norm. A block's second residual is added together with the norm that follows it,
        which is the next block's, or the last one."""
        ops, eps = self.ops, self.config.eps
        normed = ops.norm_modulate(hidden, modulation.attn_scale, eps, takes_fp8(self.blocks[0].attn.to_qkv))
        for layer, block in enumerate(self.in_order(self.blocks)):
            attended = attend(layer, block.attn, normed)
            if attended is None:
                break
            of_attention = block.attn.to_out(ops.quantize(attended) if takes_fp8(block.attn.to_out) else attended)
            hidden, normed = ops.add_norm_modulate(
                hidden, modulation.attn_gate, of_attention, modulation.mlp_scale, eps, takes_fp8(block.mlp.gate_up)
            )
            is_last = layer + 1 == len(self.blocks)
            next_scale = modulation.out_scale if is_last else modulation.attn_scale
            fp8 = not is_last and takes_fp8(self.blocks[layer + 1].attn.to_qkv)
            hidden, normed = ops.add_norm_modulate(hidden, modulation.mlp_gate, block.mlp(normed), next_scale, eps, fp8)
        return normed
