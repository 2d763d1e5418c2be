"""What a request keeps of its prefix between denoise steps, one per CFG branch.

With `causal_condition` the prefix depends neither on the step nor on the target, so its keys and values (after the
q/k norm and rotation) are all that later steps need: 2 × layers × tokens × width elements, 0.5 MiB a token at real
size in bfloat16. A checkpoint without it recomputes the prefix in every step; then the embedded tokens are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.layout import PrefixLayout


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values of a prefix: `kv` is (layers, 2, prefix tokens, heads, head_dim), keys first."""

    layout: PrefixLayout
    kv: Tensor

    @property
    def num_bytes(self) -> int:
        return self.kv.nbytes


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
