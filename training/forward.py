"""The training forward: the service's own layers over many padded rows at once, prefix and target together.

Serving runs a prefix alone and then its target; here one pass does both, with the same blocks, positions and
block-causal attention. All rows of a batch share a layout (text, images, text) and differ only in the length of their
last text, which is padded. Causality keeps padding away from the prefix. It is kept from target queries by eight extra
channels that only lower the score of padded keys: an attention without a mask runs several times faster than one with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layout import Grid, PrefixLayout, prefix_layout
from models.ops import PLAIN
from models.qwen3_vl import VisionTower
from models.rope import THETA, prefix_table, target_table
from models.text_encoder import TextEncoder
from models.transformer import Block, Transformer

EXTRA_CHANNELS = 8
PADDED_SCORE = -4000.0
Segments = tuple[tuple[int, int, bool], ...]  # start, end, is image


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What the rows of a batch share. `is_slot` runs over the padded vision-language sequence, system turn included;
    `lead` is its length up to the padded tail, and `image_starts` says where each image's slots begin."""

    prefix: PrefixLayout
    num_system_tokens: int
    is_slot: tuple[bool, ...]

    @classmethod
    def of(cls, input_ids: Sequence[int], slot_id: int, num_system_tokens: int, grids: Sequence[Grid]) -> RowLayout:
        is_slot = tuple(token == slot_id for token in input_ids)
        return cls(prefix_layout(is_slot[num_system_tokens:], grids), num_system_tokens, is_slot)

    @property
    def lead(self) -> int:
        """Tokens of the vision-language sequence before the padded tail."""
        return len(self.is_slot) - self.prefix.segments[-1].num_tokens

    @property
    def image_starts(self) -> tuple[int, ...]:
        return tuple(
            index for index, slot in enumerate(self.is_slot) if slot and not (index and self.is_slot[index - 1])
        )

    @property
    def segments(self) -> Segments:
        return tuple((segment.start, segment.end, segment.grid is not None) for segment in self.prefix.segments)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, key_score: Tensor, segments: Segments) -> Tensor:
    """Block-causal attention over (rows, tokens, heads, channels); the target follows the last segment."""
    scale = q.shape[-1] ** -0.5
    pad = (0, EXTRA_CHANNELS)
    q, v = F.pad(q, pad, value=1.0).transpose(1, 2), F.pad(v, pad).transpose(1, 2)
    score = (key_score / EXTRA_CHANNELS)[..., None, None].expand(-1, -1, k.shape[2], EXTRA_CHANNELS)
    k = torch.cat([k, score.to(k.dtype)], dim=-1).transpose(1, 2)
    outputs = []
    for start, end, is_image in (*segments, (segments[-1][1], q.shape[2], True)):
        mask = None
        if not is_image and start:
            mask = torch.arange(start, end, device=q.device)[:, None] >= torch.arange(end, device=q.device)
        outputs.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, :end], v[:, :, :end], attn_mask=mask, is_causal=not is_image and not start,
                scale=scale,
            )
        )  # fmt: skip
    return torch.cat(outputs, dim=2).transpose(1, 2)[..., :-EXTRA_CHANNELS]


def run_block(
    block: Block,
    hidden: Tensor,
    of_prefix: Tensor,
    of_target: Tensor,
    rotary: Tensor,
    key_score: Tensor,
    segments: Segments,
) -> Tensor:
    """One block. `of_prefix` (1, 4, dim) and `of_target` (rows, 4, dim) are the modulations of the two parts."""
    rows, tokens, dim = hidden.shape
    prefix_len = segments[-1][1]

    def spread(index: int) -> Tensor:
        before = of_prefix[:, index : index + 1].expand(rows, prefix_len, dim)
        return torch.cat([before, of_target[:, index : index + 1].expand(rows, tokens - prefix_len, dim)], dim=1)

    eps = block.attn.eps
    q, k, v = PLAIN.split_qkv(block.attn.to_qkv(PLAIN.norm_modulate(hidden, spread(0), eps)), block.attn, rotary)
    attended = padded_attention(q, k, v, key_score, segments)
    of_attention = block.attn.to_out(attended.flatten(2))
    hidden, normed = PLAIN.add_norm_modulate(hidden, spread(1), of_attention, spread(2), eps)
    return hidden + spread(3) * block.mlp(normed)


def run_text_layer(layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One decoder layer of the language model, causal over the padded sequence."""
    attn = layer.self_attn
    x = layer.input_layernorm(hidden)
    q = attn.q_norm(attn.q_proj(x).unflatten(-1, (-1, attn.head_dim))).transpose(1, 2)
    k = attn.k_norm(attn.k_proj(x).unflatten(-1, (-1, attn.head_dim))).transpose(1, 2)
    v = attn.v_proj(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
    q, k = (_rotate_half(part.float(), cos, sin).to(v.dtype) for part in (q, k))
    repeats = attn.q_proj.out_features // attn.k_proj.out_features
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attn.scaling)
    hidden = hidden + attn.o_proj(attended.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def run_vision_block(block: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One block of the vision tower over (images, patches, channels)."""
    attn = block.attn
    q, k, v = attn.qkv(block.norm1(hidden)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = (_rotate_half(part.float(), cos, sin).to(v.dtype) for part in (q, k))
    attended = F.scaled_dot_product_attention(q, k, v, scale=attn.scaling)
    hidden = hidden + attn.proj(attended.transpose(1, 2).flatten(2))
    return hidden + block.mlp(block.norm2(hidden))


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class JointForward(nn.Module):
    """Text encoder and transformer as one network over rows of one layout."""

    def __init__(self, encoder: TextEncoder, transformer: Transformer, grid: Grid, layout: RowLayout) -> None:
        super().__init__()
        self.encoder, self.transformer, self.layout, self.grid = encoder, transformer, layout, grid
        model = encoder.model
        self.block, self.text_layer, self.vision_block = run_block, run_text_layer, run_vision_block
        positions = encoder.positions(layout.num_system_tokens, layout.prefix)
        cos, sin = model.language_model.rotary(positions.to(model.visual.pos_embed.weight.device))
        axes = transformer.config.axes_dims_rope
        self.register_buffer("text_rotary", torch.stack([cos, sin])[:, None, None], persistent=False)
        self.register_buffer("text_index", encoder.indices(layout.prefix)[0], persistent=False)
        self.register_buffer("prefix_rotary", prefix_table(layout.prefix, axes), persistent=False)
        self.register_buffer("target_rotary", target_table(grid, 0, axes), persistent=False)
        if layout.image_starts:
            self._prepare_vision(model.visual, layout.prefix.segments[1].grid)

    def _prepare_vision(self, visual: VisionTower, grid: Grid | None) -> None:
        """Positions of the patches of one image, in the merge-block order of the vision tower. Its learned grid must
        have the patches' own size, so that nothing is interpolated."""
        assert grid is not None and grid.num_tokens == visual.pos_embed.num_embeddings
        order = torch.arange(grid.num_tokens).reshape(grid.height // 2, 2, grid.width // 2, 2).permute(0, 2, 1, 3)
        order = order.reshape(-1)
        self.register_buffer("patch_order", order, persistent=False)
        rotary = visual.rotary(order // grid.width, order % grid.width)
        self.register_buffer("patch_rotary", torch.stack(rotary), persistent=False)

    def compile(self) -> None:
        """Compile the transformer's block, once for all; the other layers are small and not worth the minute."""
        self.block = torch.compile(run_block, dynamic=False)

    def see(self, patches: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The vision tower over `patches` (images, patches, 3 × side²) in [-1, 1]: slots, and those for the first
        layers of the language model."""
        visual = self.encoder.model.visual
        weight = visual.patch_embed.proj.weight.sum(2).flatten(1)  # a still image repeats over the temporal patch
        hidden = F.linear(patches, weight, visual.patch_embed.proj.bias) + visual.pos_embed.weight[self.patch_order]
        deep = []
        for index, block in enumerate(visual.blocks):
            hidden = self.vision_block(block, hidden, *self.patch_rotary)
            if index in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(index)]
                deep.append(merger(hidden).unflatten(0, (len(patches), -1)))
        return visual.merger(hidden).unflatten(0, (len(patches), -1)), deep

    def read(self, input_ids: Tensor, patches: Sequence[Tensor] = ()) -> Tensor:
        """Prompt embeddings with the image slots left out: (rows, text tokens, hidden size)."""
        model = self.encoder.model.language_model
        hidden = model.embed_tokens(input_ids)
        seen = [self.see(of_image) for of_image in patches]
        if seen:
            hidden = self._put(hidden, [slots for slots, _ in seen], add=False)
        for index, layer in enumerate(model.layers):
            hidden = self.text_layer(layer, hidden, *self.text_rotary)
            if seen and index < len(seen[0][1]):
                hidden = self._put(hidden, [deep[index] for _, deep in seen], add=True)
        return hidden[:, self.layout.num_system_tokens :][:, self.text_index]

    def _put(self, hidden: Tensor, images: Sequence[Tensor], *, add: bool) -> Tensor:
        parts, cursor = [], 0
        for start, slots in zip(self.layout.image_starts, images, strict=True):
            end = start + slots.shape[1]
            parts += [hidden[:, cursor:start], hidden[:, start:end] + slots if add else slots.to(hidden.dtype)]
            cursor = end
        return torch.cat([*parts, hidden[:, cursor:]], dim=1)

    def forward(
        self,
        embeds: Tensor,
        lengths: Tensor,
        conditions: Sequence[Tensor],
        latents: Tensor,
        timestep: Tensor,
        tap: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Velocity of the target tokens (rows, tokens, channels), and the hidden target tokens behind block `tap`.

        `embeds` comes from `read`; `lengths` (rows,) counts the whole vision-language sequence without padding;
        `conditions` holds one (rows, tokens, channels) per image; `timestep` is (rows,) float32 in [0, 1].
        """
        transformer, segments = self.transformer, self.layout.segments
        prefix_len = segments[-1][1]
        tail = lengths - self.layout.lead
        text, images, taken, parts = transformer.txt_in(embeds), iter(conditions), 0, []
        for start, end, is_image in segments:
            parts.append(transformer.img_in(next(images)) if is_image else text[:, taken : taken + end - start])
            taken += 0 if is_image else end - start
        hidden = torch.cat([part.to(text.dtype) for part in (*parts, transformer.img_in(latents))], dim=1)
        of_prefix = self._modulation(torch.zeros(1, device=latents.device))
        of_target, out_scale = self._modulation(timestep), transformer.modulate(timestep).out_scale
        tokens = torch.arange(hidden.shape[1], device=hidden.device)
        is_padding = (tokens >= segments[-1][0] + tail[:, None]) & (tokens < prefix_len)
        key_score = torch.where(is_padding, PADDED_SCORE, 0.0)
        rotary = self._rotary(tail)
        tapped = hidden
        for index, block in enumerate(transformer.blocks):
            hidden = self.block(block, hidden, of_prefix, of_target, rotary, key_score, segments)
            if index == tap:
                tapped = hidden[:, prefix_len:]
        target = hidden[:, prefix_len:]
        normed = PLAIN.norm_modulate(target, out_scale, transformer.config.eps)
        return transformer.proj_out(normed), tapped

    def _modulation(self, timestep: Tensor) -> Tensor:
        modulation = self.transformer.modulate(timestep)
        parts = (modulation.attn_scale, modulation.attn_gate, modulation.mlp_scale, modulation.mlp_gate)
        return torch.cat(parts, dim=1)

    def _rotary(self, tail: Tensor) -> Tensor:
        """Tables of prefix and target, (rows, 2, tokens, head_dim / 2). A target's frame is where its text ends, so
        every row has its own frame angles."""
        rows, frame_dims = len(tail), self.transformer.config.axes_dims_rope[0]
        frame = (self.layout.prefix.segments[-1].position + tail).float()
        inverse = 1.0 / torch.pow(THETA, torch.arange(0, frame_dims, 2, device=tail.device).float() / frame_dims)
        angles = (frame[:, None] * inverse)[:, None].expand(-1, self.grid.num_tokens, -1)
        turned = torch.stack([angles.cos(), angles.sin()], dim=1)
        fixed = self.target_rotary[None, :, :, frame_dims // 2 :].expand(rows, -1, -1, -1)
        target = torch.cat([turned, fixed], dim=-1)
        return torch.cat([self.prefix_rotary.expand(rows, -1, -1, -1), target], dim=2)
