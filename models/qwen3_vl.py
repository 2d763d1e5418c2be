"""Qwen3-VL as this service reads prompts with it: one prompt at a time, images that do not move, no final norm.

Modules carry the published names, so a checkpoint's tensors are its parameters. Text and images share one sequence;
rotary positions have three axes whose channels are interleaved. What the vision tower sees takes the place of the image
slots, and its intermediate features are added behind the first layers ("deepstack").
Oracle: `Qwen3VLModel` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import LanguageConfig, TextEncoderConfig, VisionConfig

NORM_EPS = 1e-6  # of the vision tower, whose config does not tell


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """What the vision tower made of all images of a prompt: `embeds` (slots, hidden size) take the place of the tokens
    at `slots`, and entry i of `deepstack` is added to them behind layer i."""

    slots: Tensor
    embeds: Tensor
    deepstack: Sequence[Tensor]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first half of the last dimension of x (tokens, heads, head_dim) against the second, in float32; cos and
    sin are (tokens, head_dim)."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first, second], dim=-1) * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return turned.to(x.dtype)


def embedding(count: int, dim: int) -> nn.Embedding:
    """An embedding that draws no weights: on the meta device that alone imports a second's worth of compiler."""
    return nn.Embedding.from_pretrained(torch.empty(count, dim), freeze=False)


class RMSNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class TextAttention(nn.Module):
    """Causal attention with fewer heads of keys and values than of queries, and norms over each head."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (tokens, hidden size)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate_halves(self.q_norm(q), cos, sin), rotate_halves(self.k_norm(k), cos, sin)
        return self.o_proj(causal_attention(q, k, v))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From (tokens, heads, head_dim), k and v with fewer heads, to (tokens, heads × head_dim)."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)


class TextMLP(nn.Module):
    """Feed-forward with a SiLU gate."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    """One layer of the language model."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.self_attn = TextAttention(config)
        self.mlp = TextMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


ApplyLayer = Callable[[TextLayer, Tensor, Tensor, Tensor], Tensor]  # layer, hidden, cosines, sines


class LanguageModel(nn.Module):
    """Embedding and layers. The final norm is left out: the transformer was trained on what comes before it."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers: list[TextLayer] = nn.ModuleList([TextLayer(config) for _ in range(config.num_hidden_layers)])  # type: ignore[assignment]
        self.in_order: Callable[[Iterable[TextLayer]], Iterable[TextLayer]] = iter  # unless weights are streamed

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (tokens, head_dim) float32 of positions (3, tokens): temporal, height, width. Of the
        temporal axis' channels, every third goes to the height and to the width, up to their sections' ends."""
        dim = self.config.head_dim
        channel = torch.arange(0, dim, 2, dtype=torch.float, device=positions.device)
        angles = positions[..., None].float() * (1.0 / self.config.rope_theta ** (channel / dim))
        mixed = angles[0].clone()
        for axis in (1, 2):
            turns = slice(axis, 3 * self.config.mrope_section[axis], 3)
            mixed[:, turns] = angles[axis][:, turns]
        mixed = torch.cat([mixed, mixed], dim=-1)
        return mixed.cos(), mixed.sin()

    def embed(self, input_ids: Tensor, vision: VisionFeatures | None = None) -> Tensor:
        """What goes into the first layer, (tokens, hidden size)."""
        hidden: Tensor = self.embed_tokens(input_ids)
        if vision is not None:
            hidden[vision.slots] = vision.embeds
        return hidden

    def run(
        self, apply: ApplyLayer, hidden: Tensor, cos: Tensor, sin: Tensor, vision: VisionFeatures | None = None
    ) -> Tensor:
        """All layers, each by `apply`."""
        for number, layer in enumerate(self.in_order(self.layers)):
            hidden = apply(layer, hidden, cos, sin)
            if vision is not None and number < len(vision.deepstack):
                hidden[vision.slots] += vision.deepstack[number]
        return hidden

    def forward(self, input_ids: Tensor, positions: Tensor, vision: VisionFeatures | None = None) -> Tensor:
        """The last layer's output, (tokens, hidden size). input_ids: (tokens,); positions: (3, tokens)."""
        return self.run(TextLayer.forward, self.embed(input_ids, vision), *self.rotary(positions), vision)


class PatchEmbed(nn.Module):
    """Pixels of a patch, flattened, to the tower's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, kernel)

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Every patch of an image attends to every other."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.scaling = (config.hidden_size // config.num_heads) ** -0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (patches, hidden size)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))


class VisionMLP(nn.Module):
    """Feed-forward with a GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """One block of the vision tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), cos, sin)
        return hidden + self.mlp(self.norm2(hidden))


class PatchMerger(nn.Module):
    """Neighbouring patches to one slot. Those behind inner blocks norm the merged patches, the last one each patch."""

    def __init__(self, config: VisionConfig, norm_merged: bool) -> None:
        super().__init__()
        self.merged = config.hidden_size * config.spatial_merge_size**2
        self.norm_merged = norm_merged
        self.norm = nn.LayerNorm(self.merged if norm_merged else config.hidden_size, eps=NORM_EPS)
        self.linear_fc1 = nn.Linear(self.merged, self.merged)
        self.linear_fc2 = nn.Linear(self.merged, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # (patches, hidden size), in merge-block order -> (slots, out hidden size)
        merged = self.norm(x.reshape(-1, self.merged)) if self.norm_merged else self.norm(x).reshape(-1, self.merged)
        return self.linear_fc2(F.gelu(self.linear_fc1(merged)))


class VisionTower(nn.Module):
    """Patches of one image, in merge-block order, to slots and deepstack features."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.deepstack_visual_indexes = config.deepstack_visual_indexes
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks: list[VisionBlock] = nn.ModuleList([VisionBlock(config) for _ in range(config.depth)])  # type: ignore[assignment]
        self.merger = PatchMerger(config, norm_merged=False)
        self.deepstack_merger_list = nn.ModuleList(
            [PatchMerger(config, norm_merged=True) for _ in config.deepstack_visual_indexes]
        )

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """`patches` (patches, channels × frames × side²) of a `grid` (rows, columns): what stands at the slots, then
        the deepstack features, as (1 + deepstack layers, slots, out hidden size)."""
        hidden = self.patch_embed(patches) + self._learned_positions(grid).to(patches.dtype)
        cos, sin = self.rotary(*(self._ordered(places) for places in self._places(grid)))
        features = []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, cos, sin)
            if number in self.deepstack_visual_indexes:
                merger = self.deepstack_merger_list[self.deepstack_visual_indexes.index(number)]
                features.append(merger(hidden))
        return torch.stack([self.merger(hidden), *features])

    def rotary(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (patches, head_dim) float32 of patches at `rows` and `columns`, both (patches,)."""
        half = self.config.hidden_size // self.config.num_heads // 2
        channel = torch.arange(0, half, 2, dtype=torch.float, device=rows.device)
        inverse_frequencies = 1.0 / self.config.rope_theta ** (channel / half)
        angles = torch.cat([places[:, None].float() * inverse_frequencies for places in (rows, columns)], dim=-1)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def _places(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        rows, columns = (torch.arange(length, device=self.pos_embed.weight.device) for length in grid)
        places = torch.meshgrid(rows, columns, indexing="ij")
        return places[0], places[1]

    def _learned_positions(self, grid: tuple[int, int]) -> Tensor:
        """The learned square of position embeddings, stretched to the grid: (patches, hidden size)."""
        side = round(self.config.num_position_embeddings**0.5)
        square = self.pos_embed.weight.float().T.unflatten(1, (side, side)).unsqueeze(0)
        stretched = F.interpolate(square, size=grid, mode="bilinear", align_corners=True)[0]
        return self._ordered(stretched.permute(1, 2, 0))

    def _ordered(self, values: Tensor) -> Tensor:
        """(rows, columns, …) to (patches, …) in merge-block order."""
        merge = self.config.spatial_merge_size
        blocks = values.unflatten(0, (-1, merge)).unflatten(2, (-1, merge))
        return blocks.transpose(1, 2).flatten(0, 3)


class Qwen3VL(nn.Module):
    """Both parts."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.visual = VisionTower(config.vision)
        self.language_model = LanguageModel(config.language)
