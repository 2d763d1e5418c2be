"""Networks whose weights wait in host memory and take turns on the device.

A network's weights lie in one piece of pinned host memory, into which they are loaded: the process has no other copy.
All networks share one arena on the device, and a weight's place in it never changes, so captured steps stay valid
whoever was there in between. By component a whole network is copied when its turn comes. By block only what lies
outside of its blocks is; the blocks pass through a ring of slots, each copied on a stream of its own while the one
before it computes, in every forward anew and, under capture, as part of the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from models.checkpoint import Room, stored_dtypes
from models.errors import CheckpointError

Block = TypeVar("Block", bound=nn.Module)

ALIGNMENT = 256  # bytes, as the device's own allocations have at least
RING = 2  # blocks on the device: one computes, the next is copied


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a weight lies in its network's memory."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel() * self.dtype.itemsize

    def in_(self, memory: Tensor, shift: int = 0) -> Tensor:
        """The weight in `memory`, bytes of which the network's begin at `shift`."""
        piece = memory[self.offset + shift : self.end + shift].view(self.dtype)
        return piece.as_strided(self.shape, self.stride)


class WeightLayout:
    """How a network's weights lie in one piece of memory: those outside of blocks, then block by block."""

    def __init__(self, weights: Mapping[str, Tensor], blocks: str | None) -> None:
        """`weights` tell names, shapes, strides and dtypes; `blocks` is the name of the sequence of blocks, None when
        these are not to be apart."""
        self.places: dict[str, _Place] = {}
        self.piece_of: dict[str, int] = {}
        self.pieces: list[tuple[int, int]] = []  # begin and end in bytes; the first is what lies outside of blocks
        by_piece: dict[int, list[str]] = {0: []}
        for name in weights:
            inside = blocks is not None and name.startswith(f"{blocks}.")
            number = 1 + int(name[len(f"{blocks}.") :].partition(".")[0]) if inside else 0
            by_piece.setdefault(number, []).append(name)
        end = 0
        for number, names in sorted(by_piece.items()):
            start = end
            for name in names:
                weight = weights[name]
                place = self.places[name] = _Place(_aligned(end), weight.shape, weight.stride(), weight.dtype)
                self.piece_of[name] = number
                end = place.end
            end = _aligned(end)
            self.pieces.append((start, end))

    @classmethod
    def of_unloaded(cls, network: nn.Module, blocks: str | None, dtype: torch.dtype) -> Self:
        """The layout of a network that is to be loaded in `dtype`."""
        dtypes = stored_dtypes(network, dtype)  # the conversion moves nothing: there is no data yet
        return cls({name: weight.to(dtypes[name]) for name, weight in network.named_parameters()}, blocks)

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1][1]

    @property
    def outside_bytes(self) -> int:
        return self.size_of(0)

    @property
    def block_bytes(self) -> int:
        return max((self.size_of(piece) for piece in range(1, len(self.pieces))), default=0)

    def size_of(self, piece: int) -> int:
        start, end = self.pieces[piece]
        return end - start


class _Kept:
    """One network's weights in host memory."""

    def __init__(self, layout: WeightLayout, blocks: str | None) -> None:
        self.layout = layout
        self.blocks = blocks  # what they are called, if they are apart
        self.memory = torch.empty(layout.num_bytes, dtype=torch.uint8)

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """`models.checkpoint.Room` in host memory."""
        return self.layout.places[name].in_(self.memory)

    def send(self, piece: int, target: Tensor) -> None:
        """Copy a piece to the beginning of `target`."""
        start, end = self.layout.pieces[piece]
        target[: end - start].copy_(self.memory[start:end], non_blocking=True)


class OffloadedWeights:
    """The weights of all networks. First every network is kept, then they `settle`, then one can be brought at a
    time; `by_block`, its blocks are streamed while it runs."""

    def __init__(self, device: torch.device, by_block: bool) -> None:
        self._device = device
        self.by_block = by_block
        self._kept: dict[nn.Module, _Kept] = {}
        self._present: _Kept | None = None
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __repr__(self) -> str:
        host = sum(kept.memory.nbytes for kept in self._kept.values())
        return f"<OffloadedWeights: {host} bytes in host memory, {self._arena.nbytes} on the device>"

    def room(self, network: nn.Module, blocks: str, dtype: torch.dtype) -> Room:
        """Keep a network that is to be loaded in `dtype`, and say where its loader puts the weights. `blocks` names its
        sequence of blocks; their owner has an `in_order`."""
        apart = blocks if self.by_block else None
        return self._keep(network, _Kept(WeightLayout.of_unloaded(network, apart, dtype), apart)).room

    def adopt(self, network: nn.Module) -> None:
        """Keep a network that has been loaded on the device; it leaves when they `settle`."""
        weights = {name: weight.data for name, weight in network.named_parameters()}
        kept = self._keep(network, _Kept(WeightLayout(weights, None), None))
        for name, weight in weights.items():
            kept.layout.places[name].in_(kept.memory).copy_(weight)

    def settle(self) -> None:
        """Give every weight its place on the device."""
        layouts = [kept.layout for kept in self._kept.values()]
        outside = max(layout.outside_bytes for layout in layouts)
        block = max(layout.block_bytes for layout in layouts)
        self._arena = torch.empty(outside + RING * block, dtype=torch.uint8, device=self._device)
        slots = [self._arena[outside + number * block :][:block] for number in range(RING)]
        for network, kept in self._kept.items():
            for name, place in kept.layout.places.items():
                piece = kept.layout.piece_of[name]
                start, _ = kept.layout.pieces[piece]
                target = self._arena if piece == 0 else slots[(piece - 1) % RING]
                owner, _, leaf = name.rpartition(".")
                weight = nn.Parameter(place.in_(target, -start), requires_grad=False)
                network.get_submodule(owner).register_parameter(leaf, weight)
            if kept.blocks is not None:
                owner, _, _ = kept.blocks.rpartition(".")
                network.get_submodule(owner).in_order = partial(self._stream, kept, slots)  # type: ignore[assignment]

    def bring(self, network: nn.Module) -> None:
        """Have a network's weights on the device, those outside of blocks, for what is queued after this."""
        kept = self._kept[network]
        if self._present is not kept:
            self._present = None
            kept.send(0, self._arena)
            self._present = kept

    def _keep(self, network: nn.Module, kept: _Kept) -> _Kept:
        self._kept[network] = kept
        if self._side is not None:
            _pin(kept.memory)
            weakref.finalize(self, _unpin, kept.memory)
        return kept

    def _stream(self, kept: _Kept, slots: Sequence[Tensor], blocks: Iterable[Block]) -> Iterator[Block]:
        """`blocks`, each with its weights in its slot while it is the current one."""
        side, count = self._side, len(kept.layout.pieces) - 1
        if side is None:
            for number, block in enumerate(blocks):
                kept.send(number + 1, slots[number % RING])
                yield block
            return
        main = torch.cuda.current_stream(self._device)
        arrived = [torch.cuda.Event() for _ in range(count)]

        def send(number: int) -> None:
            side.wait_stream(main)  # whatever used the slot before
            with torch.cuda.stream(side):
                kept.send(number + 1, slots[number % RING])
                arrived[number].record(side)

        try:
            for number in range(min(RING, count)):
                send(number)
            for number, block in enumerate(blocks):
                main.wait_event(arrived[number])
                yield block
                if number + RING < count:
                    send(number + RING)
        finally:
            main.wait_stream(side)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _pin(memory: Tensor) -> None:
    """Lock pages that exist: PyTorch's own pinned memory is rounded up to a power of two."""
    try:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    except torch.cuda.CudaError as error:
        gib = memory.nbytes / 2**30
        raise CheckpointError(f"offload: {gib:.1f} GiB of host memory cannot be pinned ({error})") from None


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
