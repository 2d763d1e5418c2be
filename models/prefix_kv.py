"""What a request keeps of its prefix between denoise steps, one per CFG branch.

With `causal_condition` the prefix depends neither on the step nor on the target, so its keys and values (after the
q/k norm and rotation) are all that later steps need: 2 × layers × tokens × width elements, 0.5 MiB a token at real
size in bfloat16, half of that in FP8. A checkpoint without it recomputes the prefix in every step; then the embedded
tokens are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from models.config import TransformerConfig
from models.layout import PrefixLayout
from models.quantization import FP8, Quantized

KV_FORMATS = {"auto": (False, False), "fp8": (True, True), "fp8_v": (False, True)}  # whether keys, and values, are E4M3


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values of a prefix, each (layers, prefix tokens, heads, head_dim): in the working dtype, or E4M3 with
    float32 scales (layers, prefix tokens, heads, 1). Quantized once, when they are written."""

    layout: PrefixLayout
    keys: Tensor | Quantized
    values: Tensor | Quantized

    @classmethod
    def allocate(cls, layout: PrefixLayout, config: TransformerConfig, like: Tensor, fp8: tuple[bool, bool]) -> Self:
        """Room for a prefix, in the dtype and on the device of `like`; `fp8` is one of `KV_FORMATS`."""
        heads, head_dim = config.num_attention_heads, config.attention_head_dim
        shape = (config.num_layers, layout.prefix_len_tokens, heads)

        def room(quantized: bool) -> Tensor | Quantized:
            if not quantized:
                return like.new_empty(*shape, head_dim)
            return Quantized(
                like.new_empty(*shape, head_dim, dtype=FP8), like.new_empty(*shape, 1, dtype=torch.float32)
            )

        return cls(layout, room(fp8[0]), room(fp8[1]))

    def write(self, layer: int, k: Tensor, v: Tensor, quantize: Callable[[Tensor], Quantized]) -> None:
        """Keep one layer's keys and values, each (1, prefix tokens, heads, head_dim)."""
        for room, part in ((self.keys, k[0]), (self.values, v[0])):
            if isinstance(room, Quantized):
                quantized = quantize(part)
                room.values[layer], room.scales[layer] = quantized.values, quantized.scales
            else:
                room[layer] = part

    def read(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, each (prefix tokens, heads, head_dim)."""
        k, v = (
            Quantized(part.values[layer], part.scales[layer]).to(dtype) if isinstance(part, Quantized) else part[layer]
            for part in (self.keys, self.values)
        )
        return k, v

    def first(self, layout: PrefixLayout) -> Self:
        """As many tokens as `layout` has, in the same memory."""
        return self._each(layout, lambda part: part[:, : layout.prefix_len_tokens])

    def clone(self) -> Self:
        """A contiguous copy."""
        return self._each(self.layout, lambda part: part.clone(memory_format=torch.contiguous_format))

    def _each(self, layout: PrefixLayout, change: Callable[[Tensor], Tensor]) -> Self:
        def changed(part: Tensor | Quantized) -> Tensor | Quantized:
            if isinstance(part, Quantized):
                return Quantized(change(part.values), change(part.scales))
            return change(part)

        return type(self)(layout, changed(self.keys), changed(self.values))

    @property
    def fp8(self) -> tuple[bool, bool]:
        """Which of `KV_FORMATS` this is."""
        return isinstance(self.keys, Quantized), isinstance(self.values, Quantized)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where keys, values, key scales and value scales begin; 0 for scales that there are not."""
        parts, scales = [], []
        for part in (self.keys, self.values):
            parts.append(part.values.data_ptr() if isinstance(part, Quantized) else part.data_ptr())
            scales.append(part.scales.data_ptr() if isinstance(part, Quantized) else 0)
        return parts[0], parts[1], scales[0], scales[1]

    @property
    def num_bytes(self) -> int:
        return sum(
            part.values.nbytes + part.scales.nbytes if isinstance(part, Quantized) else part.nbytes
            for part in (self.keys, self.values)
        )


def kv_bytes_per_token(config: TransformerConfig, dtype: torch.dtype, fp8: tuple[bool, bool]) -> int:
    """Bytes of one prefix token of one branch, all layers."""
    per_head = sum(
        config.attention_head_dim + 4 if part else config.attention_head_dim * dtype.itemsize for part in fp8
    )
    return config.num_layers * config.num_attention_heads * per_head


@dataclass(frozen=True, slots=True)
class EmbeddedPrefix:
    """The embedded prefix tokens of a checkpoint that cannot cache: `hidden` is (1, prefix tokens, inner_dim) and
    `rotary` the prefix's table on the same device."""

    layout: PrefixLayout
    hidden: Tensor
    rotary: Tensor

    @property
    def num_bytes(self) -> int:
        return self.hidden.nbytes + self.rotary.nbytes


Prefix = PrefixKV | EmbeddedPrefix
