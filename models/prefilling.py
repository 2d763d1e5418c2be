"""Prefill of a prompt: plainly, or on CUDA as captured graphs that are replayed.

A prompt is short, so its prefill is bound by launches, not by arithmetic. Text is causal: padding behind it cannot
reach it, and a graph captured for a length serves every shorter prompt. Prefixes with condition images are long and run
without one. A length that has no memory for its graph runs padded all the same, by the same kernels: a prompt's prefix
does not depend on what else there is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import TransformerConfig
from models.graphs import GraphPool
from models.layout import PrefixLayout, prefix_layout
from models.prefix_kv import Prefix, PrefixKV, kv_bytes_per_token
from models.rope import prefix_table
from models.transformer import Transformer

log = logging.getLogger(__name__)

LENGTHS = (64, 128, 192, 256, 384, 512)  # captured when first needed; longer prompts run without a graph


class Prefiller(Protocol):
    """Fills prefixes, in one of `KV_FORMATS`."""

    def prefill(self, prompt_embeds: Tensor, condition_latents: Sequence[Tensor], layout: PrefixLayout) -> Prefix:
        """As `Transformer.prefill`."""

    def clear(self) -> None:
        """Give back the memory that is kept between prompts."""


class PlainPrefiller:
    """The transformer's own `prefill`, on any device."""

    def __init__(self, transformer: Transformer, kv_fp8: tuple[bool, bool]) -> None:
        self._transformer = transformer
        self._kv_fp8 = kv_fp8

    def prefill(self, prompt_embeds: Tensor, condition_latents: Sequence[Tensor], layout: PrefixLayout) -> Prefix:
        return self._transformer.prefill(prompt_embeds, condition_latents, layout, self._kv_fp8)

    def clear(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Graph:
    text: Tensor  # (length, context_in_dim)
    rotary: Tensor  # (2, length, head_dim / 2)
    kv: PrefixKV  # of `length` tokens
    graph: torch.cuda.CUDAGraph

    def run(self, prompt_embeds: Tensor, layout: PrefixLayout) -> PrefixKV:
        tokens = len(prompt_embeds)
        self.text[:tokens] = prompt_embeds
        self.text[tokens:].zero_()  # attention reads whole tiles: what an earlier prompt left may not be finite
        self.graph.replay()
        return self.kv.first(layout).clone()


class CapturedPrefiller:
    """Short text by graphs. For checkpoints whose prefix is cached."""

    def __init__(self, transformer: Transformer, kv_fp8: tuple[bool, bool], pool: GraphPool) -> None:
        self._transformer = transformer
        self._kv_fp8 = kv_fp8
        self._pool = pool
        self._graphs: dict[int, _Graph] = {}
        self._too_long: float = math.inf  # what is captured is shorter
        self._room: PrefixKV | None = None  # of the longest: all graphs fill it, one at a time

    def __repr__(self) -> str:
        return f"<CapturedPrefiller: {len(self._graphs)} of {len(LENGTHS)} lengths>"

    def prefill(self, prompt_embeds: Tensor, condition_latents: Sequence[Tensor], layout: PrefixLayout) -> Prefix:
        tokens = len(prompt_embeds)
        length = next((length for length in LENGTHS if length >= tokens), None)
        if length is None or condition_latents:
            return self._transformer.prefill(prompt_embeds, condition_latents, layout, self._kv_fp8)
        graph = self._graphs.get(length)
        if graph is None and length < self._too_long:
            graph = self._capture(length, prompt_embeds)
        if graph is not None:
            return graph.run(prompt_embeds, layout)
        padded = F.pad(prompt_embeds, (0, 0, 0, length - tokens))
        prefix = self._transformer.prefill(padded, (), text_layout(length), self._kv_fp8)
        assert isinstance(prefix, PrefixKV)
        return prefix.first(layout).clone()

    def clear(self) -> None:
        torch.cuda.synchronize()
        self._graphs.clear()
        self._too_long, self._room = math.inf, None

    def _capture(self, length: int, like: Tensor) -> _Graph | None:
        """None when memory does not suffice; nothing is kept then, and nothing as long is tried again before a
        `clear`."""
        try:
            captured = self._graphs[length] = self._record(length, like)
            return captured
        except torch.OutOfMemoryError:
            self._too_long = 0 if self._room is None else length  # nothing is captured without the room
        if not self._graphs:
            self._room = None
        torch.cuda.empty_cache()  # only now: the error held on to what was allocated
        log.warning("no memory to capture the prefill of %s tokens and more: it runs without a graph", length)
        return None

    def _record(self, length: int, like: Tensor) -> _Graph:
        transformer, layout = self._transformer, text_layout(length)
        text = like.new_zeros(length, like.shape[1])
        rotary = prefix_table(layout, transformer.config.axes_dims_rope).to(like.device)
        if self._room is None:
            self._room = PrefixKV.allocate(text_layout(LENGTHS[-1]), transformer.config, text, self._kv_fp8)
        kv = self._room.first(layout)
        graph, _ = self._pool.capture(lambda: transformer.fill(kv, transformer.embed_prefix(text, (), layout), rotary))
        return _Graph(text, rotary, kv, graph)


def room_bytes(config: TransformerConfig, dtype: torch.dtype, kv_fp8: tuple[bool, bool]) -> int:
    """What all graphs of a `CapturedPrefiller` fill."""
    return LENGTHS[-1] * kv_bytes_per_token(config, dtype, kv_fp8)


def text_layout(tokens: int) -> PrefixLayout:
    """The prefix of a prompt without images."""
    return prefix_layout([False] * tokens, [])
