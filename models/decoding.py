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
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from models.graphs import GraphPool
from models.packed import PackedRows, Row
from models.prefix_kv import PrefixKV
from models.transformer import Transformer

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

    def decode(self, rows: Sequence[Row]) -> tuple[Tensor, GraphResult]:
        """Velocity of every row, (rows, tokens, channels), valid until a graph of the same pool runs."""

    def clear(self) -> None:
        """Give back the memory that is kept between steps."""


class PlainDecoder:
    """The transformer's own `decode`, on any device."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer

    def decode(self, rows: Sequence[Row]) -> tuple[Tensor, GraphResult]:
        latents = torch.stack([row.latents for row in rows])
        rotary = torch.stack([row.rotary for row in rows])
        timestep = torch.tensor([row.sigma for row in rows], device=latents.device)
        return self._transformer.decode(latents, timestep, rotary, [row.prefix for row in rows]), GraphResult.OFF

    def clear(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Graph:
    packed: PackedRows
    graph: torch.cuda.CUDAGraph
    velocity: Tensor

    def run(self, rows: Sequence[Row]) -> Tensor:
        self.packed.fill(rows)
        self.graph.replay()
        return self.velocity


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    tokens: int
    capacity: int
    fp8: tuple[bool, bool]


class PackedDecoder:
    """Packed rows through the fused kernels, captured if there is a `pool`. For checkpoints whose prefix is cached."""

    def __init__(
        self,
        transformer: Transformer,
        attention: DecodeAttention,
        pool: GraphPool | None,
        *,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._transformer = transformer
        self._attention = attention
        self._pool = pool
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[_Shape, _Graph] = OrderedDict()  # the least recently used first
        self._too_large: set[_Shape] = set()

    def __repr__(self) -> str:
        return f"<PackedDecoder: {len(self._graphs)} graphs, {len(self._too_large)} shapes too large>"

    def decode(self, rows: Sequence[Row]) -> tuple[Tensor, GraphResult]:
        longest = max(row.prefix.layout.prefix_len_tokens for row in rows)
        prefix = rows[0].prefix
        fp8 = prefix.fp8 if isinstance(prefix, PrefixKV) else (False, False)
        tokens = len(rows[0].latents)
        shape = _Shape(len(rows), tokens, self._attention.capacity(tokens, longest), fp8)
        if graph := self._graphs.get(shape):
            self._graphs.move_to_end(shape)
            return graph.run(rows), GraphResult.HIT
        if self._pool and shape not in self._too_large and (graph := self._capture(self._pool, shape, rows)):
            return graph.run(rows), GraphResult.CAPTURED
        velocity = self._step(self._packed(shape, rows))
        return velocity, GraphResult.NO_MEMORY if shape in self._too_large else GraphResult.OFF

    def clear(self) -> None:
        torch.cuda.synchronize()
        self._graphs.clear()
        self._too_large.clear()

    def _packed(self, shape: _Shape, rows: Sequence[Row]) -> PackedRows:
        config, like = self._transformer.config, self._transformer.proj_out.weight
        packed = PackedRows.allocate(
            config, shape.rows, shape.tokens, shape.capacity, shape.fp8, like.dtype, like.device
        )
        packed.fill(rows)
        return packed

    def _step(self, packed: PackedRows) -> Tensor:
        return self._transformer.velocity(packed.latents, packed.timestep, partial(self._attention, packed))

    def _capture(self, pool: GraphPool, shape: _Shape, rows: Sequence[Row]) -> _Graph | None:
        """Make room and capture a shape. None when memory does not suffice; nothing is kept then, and the shape is not
        tried again before a `clear`."""
        torch.cuda.synchronize()  # a graph that is dropped must not be running
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        try:
            captured = self._graphs[shape] = self._record(pool, shape, rows)
            return captured
        except torch.OutOfMemoryError:
            self._too_large.add(shape)
        torch.cuda.empty_cache()  # only now: the error held on to what was allocated
        log.warning("no memory to capture steps of %s x %s tokens: they run without a graph", shape.rows, shape.tokens)
        return None

    def _record(self, pool: GraphPool, shape: _Shape, rows: Sequence[Row]) -> _Graph:
        packed = self._packed(shape, rows)
        graph, velocity = pool.capture(partial(self._step, packed))
        return _Graph(packed, graph, velocity)
