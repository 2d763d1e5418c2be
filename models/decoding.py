"""Decode steps of whole rows: plainly, or on CUDA as captured graphs that are replayed.

A graph is captured per number of rows, number of target tokens and capacity for prefixes (see `models.packed`), and
replayed for every later step of that shape, whoever's it is. Everything else that differs between steps is data, copied
in before each replay: nothing can be stale. Captured and eager steps run the same kernels and are equal bit for bit.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from models.packed import PackedRows
from models.prefix_kv import Prefix, PrefixKV
from models.transformer import Attention, Transformer

if TYPE_CHECKING:
    from models.fused import DecodeAttention

log = logging.getLogger(__name__)

MAX_GRAPHS = 32


class GraphResult(StrEnum):
    """How a decode step ran."""

    HIT = "hit"
    CAPTURED = "captured"
    NO_MEMORY = "no_memory"  # its shape did not fit when it was to be captured; eager since then
    OFF = "off"


class Decoder(Protocol):
    """Runs decode steps."""

    def decode(
        self,
        latents: Sequence[Tensor],
        sigmas: Sequence[float],
        rotary: Sequence[Tensor],
        prefixes: Sequence[Prefix],
    ) -> tuple[Tensor, GraphResult]:
        """Velocity of every row, (rows, tokens, channels), valid until the next call. One entry a row: latents
        (tokens, channels), the timestep, the target's rotary table (2, tokens, head_dim / 2) and the prefix."""

    def clear(self) -> None:
        """Give back the memory that is kept between steps."""


class PlainDecoder:
    """The transformer's own `decode`, on any device."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer

    def decode(
        self,
        latents: Sequence[Tensor],
        sigmas: Sequence[float],
        rotary: Sequence[Tensor],
        prefixes: Sequence[Prefix],
    ) -> tuple[Tensor, GraphResult]:
        timestep = torch.tensor(sigmas, device=latents[0].device)
        rows, tables = torch.stack(list(latents)), torch.stack(list(rotary))
        return self._transformer.decode(rows, timestep, tables, prefixes), GraphResult.OFF

    def clear(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: PackedRows
    graph: torch.cuda.CUDAGraph
    velocity: Tensor


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    tokens: int
    capacity: int


class PackedDecoder:
    """Packed rows through the fused kernels, captured if `graphs`. For checkpoints whose prefix is cached."""

    def __init__(
        self, transformer: Transformer, attention: DecodeAttention, *, graphs: bool, max_graphs: int = MAX_GRAPHS
    ) -> None:
        self._transformer = transformer
        self._attention = attention
        self._capture_allowed = graphs
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[_Shape, _Graph] = OrderedDict()  # the least recently used first
        self._too_large: set[_Shape] = set()
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def __repr__(self) -> str:
        return f"<PackedDecoder: {len(self._graphs)} graphs, {len(self._too_large)} shapes too large>"

    def decode(
        self,
        latents: Sequence[Tensor],
        sigmas: Sequence[float],
        rotary: Sequence[Tensor],
        prefixes: Sequence[Prefix],
    ) -> tuple[Tensor, GraphResult]:
        cached = [prefix for prefix in prefixes if isinstance(prefix, PrefixKV)]
        longest = max(prefix.layout.prefix_len_tokens for prefix in cached)
        shape = _Shape(len(latents), len(latents[0]), self._attention.capacity(longest))
        if graph := self._graphs.get(shape):
            self._graphs.move_to_end(shape)
            result = GraphResult.HIT
        elif self._capture_allowed and shape not in self._too_large:
            torch.cuda.synchronize()  # a graph that is dropped must not be running
            while len(self._graphs) >= self._max_graphs:
                self._graphs.popitem(last=False)
            rows = self._allocate(shape)
            rows.fill(latents, sigmas, rotary, cached)
            graph = self._capture(shape, rows)
            result = GraphResult.CAPTURED
        if graph is not None:
            graph.rows.fill(latents, sigmas, rotary, cached)
            graph.graph.replay()
            return graph.velocity, result
        rows = self._allocate(shape)
        rows.fill(latents, sigmas, rotary, cached)
        return self._step(rows), GraphResult.NO_MEMORY if shape in self._too_large else GraphResult.OFF

    def clear(self) -> None:
        torch.cuda.synchronize()
        self._graphs.clear()

    def _allocate(self, shape: _Shape) -> PackedRows:
        config, like = self._transformer.config, self._transformer.proj_out.weight
        return PackedRows.allocate(config, shape.rows, shape.tokens, shape.capacity, like.dtype, like.device)

    def _step(self, rows: PackedRows) -> Tensor:
        def attend(layer: int, attn: Attention, x: Tensor) -> Tensor:
            return self._attention(rows, layer, attn, x)

        return self._transformer.velocity(rows.latents, rows.timestep, attend)

    def _capture(self, shape: _Shape, rows: PackedRows) -> _Graph | None:
        """Run the filled rows once, so that kernels are compiled and libraries are set up, then capture them. None when
        memory does not suffice; nothing is kept then, and the shape is not tried again."""
        try:
            self._step(rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                velocity = self._step(rows)
        except torch.OutOfMemoryError:
            self._too_large.add(shape)
            torch.cuda.empty_cache()
            log.warning(
                "no memory to capture steps of %s x %s tokens: they run without a graph", shape.rows, shape.tokens
            )
            return None
        captured = self._graphs[shape] = _Graph(rows, graph, velocity)
        return captured
