"""Decides what the GPU does next. Pure state: no torch, no clock, no thread; it returns work and does none.

A request passes `encode → prefill → denoise steps → decode`. The unit is the step, not the request: every call of
`next_work` returns exactly one item, and a request that arrives while others are denoising joins them at the next
step boundary, at whatever step they are.

Order. The request with the least predicted work left leads (or, by policy, the oldest); one that has been here for
`max_stretch` times its own isolated time leads before all others. The leader names the batch key, and requests with
the same key ride along in its steps while the token budget, beyond which a batch only makes everybody wait, has room.
Preemption costs nothing, since a request's state between steps is its latents and a step index.

Between two steps of a leader at most one encode or decode is run for anybody else: of a request that is about to join,
of a finished picture, or else of a preview. A preview that is still waiting when the next one of its picture is due
gives way to it, and to the picture itself.

Memory is admitted in bytes. A leader that needs more than is free takes the prefix KV of the lowest-ranked waiting
request, which prefills again when its turn comes. Nothing is lost, and the budget is never exceeded.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from engine.batching import BatchKey
from engine.cost_model import CostModel
from engine.memory import UNLIMITED, MemoryModel
from engine.request import PreparedRequest
from engine.work import DecodeImage, DecodePreview, DenoiseStep, DropPrefix, EncodePrompt, Prefill, Sample, Work

SAME_LENGTH = 1.25  # a factor

_Rank = tuple[bool, int, float, int]  # the smaller goes first
_RANK = operator.attrgetter("rank")


class Policy(StrEnum):
    """Who leads: the request with the least predicted work left, or the one that came first."""

    SHORTEST = "shortest"
    FCFS = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a batch and a wait. `token_budget` counts target tokens over all rows of a step."""

    max_batch_rows: int = 8
    token_budget: int = 2**31
    max_stretch: float = 10.0
    policy: Policy = Policy.SHORTEST


class Phase(Enum):
    """What a request needs next, until its steps are done."""

    ENCODE = auto()
    PREFILL = auto()
    DENOISE = auto()


@dataclass(slots=True)
class _Entry:
    """A request, how far it is, and its predicted costs, which are fixed on arrival. What is asked of every entry
    between any two steps (`rank`, `expires_at_s`) is kept ready and renewed by `Scheduler._moved` where it changes."""

    request: PreparedRequest
    request_id: str
    num_steps: int
    key: BatchKey
    rows_per_sample: int
    tokens_per_sample: int
    serial: int
    encode_s: float
    prefill_s: float
    step_s: float
    decode_s: float
    starves_at_s: float
    is_starving: bool = False
    phase: Phase = Phase.ENCODE
    alone: bool = False
    rank: _Rank = (True, 0, 0.0, 0)
    rank_ends_s: float = math.inf  # its rank holds while more than this remains
    expires_at_s: float = math.inf
    steps_done: list[int] = field(default_factory=list)  # per image
    steps_left: int = 0  # over all images
    decodes_left: int = 0  # over all images; a preview counts until it is due
    decoded: int = 0
    state_bytes: int = 0  # held now
    prefix_bytes: int = 0  # held now

    @property
    def remaining_s(self) -> float:
        remaining_s = self.steps_left * self.step_s + self.decodes_left * self.decode_s
        if self.phase is not Phase.DENOISE:
            remaining_s += self.prefill_s
        if self.phase is Phase.ENCODE:
            remaining_s += self.encode_s
        return remaining_s

    def unfinished(self) -> Iterator[int]:
        """The pictures that still have steps to take."""
        return (index for index, step in enumerate(self.steps_done) if step < self.num_steps)


_Batch = list[tuple[_Entry, int]]  # requests, and which of their pictures


def _step_of(batch: _Batch) -> DenoiseStep:
    samples = [Sample(entry.request_id, index, entry.steps_done[index]) for entry, index in batch]
    return DenoiseStep(batch[0][0].key, tuple(samples))


class Scheduler:
    """All requests of one worker. Times are seconds on any one clock that only moves forward."""

    def __init__(self, limits: Limits, cost_model: CostModel, memory: MemoryModel = UNLIMITED) -> None:
        self._limits = limits
        self._cost_model = cost_model
        self._memory = memory
        self._entries: dict[str, _Entry] = {}
        self._to_decode: deque[DecodeImage] = deque()
        self._previews: dict[tuple[str, int], DecodePreview] = {}  # the newest of each picture; first in, first out
        self._serial = 0
        self._quantum_used = False  # an encode or decode ran since the last step
        # Little changes from one step to the next, so what takes a look at every request is kept while it holds: their
        # order, until a rank changes or somebody starves; the batch, until the order, a phase or a bound does; and that
        # nobody is late, until the first could be.
        self._order: list[_Entry] = []
        self._batch: _Batch | None = None
        self._is_stale = True  # order and batch
        self._starving_s = math.inf
        self._expiry_s = math.inf

    def __repr__(self) -> str:
        phases = [entry.phase.name for entry in self._entries.values()]
        counts = ", ".join(f"{phases.count(phase.name)} {phase.name.lower()}" for phase in Phase)
        to_decode = f"{len(self._to_decode)} to decode, {len(self._previews)} to preview"
        return f"<Scheduler: {counts}, {to_decode}, {self.held_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Predicted bytes that all requests hold on the device now."""
        return sum(entry.state_bytes + entry.prefix_bytes for entry in self._entries.values())

    def fits(self, request: PreparedRequest) -> bool:
        """Whether the device could ever hold the request."""
        return self._memory.total_bytes(request) <= self._memory.budget_bytes

    def add(self, request: PreparedRequest) -> None:
        """Take a request in. It must fit the device by itself."""
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id} is scheduled already")
        if not self.fits(request):
            raise ValueError(f"request {request.request_id} does not fit the device")
        costs = self._cost_model
        self._serial += 1
        entry = self._entries[request.request_id] = _Entry(
            request=request,
            request_id=request.request_id,
            num_steps=request.num_steps,
            key=request.batch_key,
            rows_per_sample=request.num_branches,
            tokens_per_sample=request.num_branches * request.target_grid.num_tokens,
            serial=self._serial,
            encode_s=costs.encode_s(request),
            prefill_s=costs.prefill_s(request),
            step_s=costs.step_s(request),
            decode_s=costs.decode_s(request),
            starves_at_s=request.arrived_s + self._limits.max_stretch * costs.isolated_s(request),
            alone=request.alone,
            steps_done=[0] * request.num_images,
            steps_left=request.num_images * request.num_steps,
            decodes_left=request.num_images * request.decodes_after(0),
        )
        self._starving_s = min(self._starving_s, entry.starves_at_s)
        self._moved(entry)

    def remove(self, request_id: str) -> bool:
        """Forget a request in whatever state it is; False when it is not here."""
        self._to_decode = deque(work for work in self._to_decode if work.request_id != request_id)
        self._is_stale = True
        self._previews = {key: work for key, work in self._previews.items() if work.request_id != request_id}
        return self._entries.pop(request_id, None) is not None

    def expired(self, now_s: float) -> tuple[str, ...]:
        """Requests that can't meet their deadline any more: started ones that are past it, and waiting ones that
        would be past it if they had the device to themselves from now on."""
        if now_s <= self._expiry_s:
            return ()
        self._expiry_s = min((entry.expires_at_s for entry in self._entries.values()), default=math.inf)
        return tuple(name for name, entry in self._entries.items() if now_s > entry.expires_at_s)

    def next_work(self, now_s: float) -> Work | None:
        """The one thing to do now, or None when there is nothing."""
        ranked = self._ranked(now_s)
        if self._batch and self._next_decode() is None:
            return _step_of(self._batch)
        leader = next((entry for entry in ranked if entry.state_bytes or self._may_start(entry)), None)
        step_is_due = self._quantum_used and leader is not None and leader.phase is Phase.DENOISE
        if not step_is_due and (decode := self._next_decode()) is not None:
            return decode
        if leader is None:
            return None
        if leader.phase is not Phase.DENOISE:
            return self._advance_leader(leader, ranked)
        if joining := self._joining(leader, ranked, may_encode=not step_is_due):
            return joining
        batch = self._fill(leader, ranked)
        if not step_is_due:  # else somebody who could not join now may join next time
            self._batch = batch
        return _step_of(batch)

    def complete(self, work: Work) -> tuple[str, ...]:
        """Record that `work` was done; returns the requests that are thereby finished and forgotten."""
        if isinstance(work, EncodePrompt | DecodeImage | DecodePreview):
            self._quantum_used = True
        if isinstance(work, DenoiseStep):
            self._quantum_used = False
            for sample in work.samples:
                self._advance(sample)
            return ()
        entry = self._entries.get(work.request_id)
        if entry is None:
            return ()
        match work:
            case EncodePrompt():
                entry.phase = Phase.PREFILL
                entry.state_bytes = self._memory.state_bytes(entry.request)
            case Prefill():
                entry.phase = Phase.DENOISE
                entry.prefix_bytes = self._memory.prefix_bytes(entry.request)
            case DropPrefix():
                entry.phase = Phase.PREFILL
                entry.prefix_bytes = 0
            case DecodePreview():
                self._previews.pop((work.request_id, work.image_index), None)
            case DecodeImage():
                return self._finish_image(entry, work)
        self._is_stale = True
        self._moved(entry)
        return ()

    def droppable(self, keep: tuple[str, ...]) -> tuple[DropPrefix, ...]:
        """What can be given up when the device is out of memory in spite of the predictions."""
        holders = (request_id for request_id, entry in self._entries.items() if entry.prefix_bytes)
        return tuple(DropPrefix(request_id) for request_id in holders if request_id not in keep)

    def reduce_budget(self, work: DenoiseStep) -> None:
        """From now on batches hold at most half the tokens of `work`, which did not fit the device."""
        tokens = sum(self._entries[sample.request_id].tokens_per_sample for sample in work.samples)
        self._limits = replace(self._limits, token_budget=min(self._limits.token_budget, tokens // 2))
        self._is_stale = True

    def _ranked(self, now_s: float) -> list[_Entry]:
        """Those that still have steps to take, first who goes first."""
        if now_s >= self._starving_s:
            self._find_starving(now_s)
        if self._is_stale:
            self._order = sorted((entry for entry in self._entries.values() if entry.steps_left), key=_RANK)
            self._batch, self._is_stale = None, False
        return self._order

    def _find_starving(self, now_s: float) -> None:
        """From now on who is overdue goes before all others, the oldest first."""
        patient = [entry for entry in self._entries.values() if not entry.is_starving]
        for entry in patient:
            if now_s >= entry.starves_at_s:
                entry.is_starving, self._is_stale = True, True
                entry.rank = (False, 0, entry.request.arrived_s, entry.serial)
        self._starving_s = min((entry.starves_at_s for entry in patient if not entry.is_starving), default=math.inf)

    def _moved(self, entry: _Entry) -> None:
        """Renew what follows from how far an entry is."""
        request, remaining_s = entry.request, entry.remaining_s
        if request.deadline_s is not None:
            entry.expires_at_s = request.deadline_s - (remaining_s if entry.phase is Phase.ENCODE else 0.0)
            self._expiry_s = min(self._expiry_s, entry.expires_at_s)
        if entry.is_starving:
            return
        if self._limits.policy is Policy.FCFS:
            rank = (True, -request.priority, request.arrived_s, entry.serial)
            entry.rank_ends_s = 0.0
        else:
            # Work of about the same length goes in order of arrival: overtaking for less gains next to nothing.
            length = round(math.log(max(remaining_s, 1e-6), SAME_LENGTH))
            rank = (True, -request.priority, length, entry.serial)
            entry.rank_ends_s = SAME_LENGTH ** (length - 0.5)
        if rank != entry.rank:
            entry.rank, self._is_stale = rank, True

    def _may_start(self, entry: _Entry) -> bool:
        """Whether the request may take its state. Started requests give their state back only at their end, so there
        must always be room for all states and the largest prefix; then each of them can be brought to its end."""
        started = [other for other in self._entries.values() if other.state_bytes]
        states = sum(other.state_bytes for other in started) + self._memory.state_bytes(entry.request)
        largest_prefix = max(self._memory.prefix_bytes(other.request) for other in (*started, entry))
        return states + largest_prefix <= self._memory.budget_bytes

    def _next_decode(self) -> DecodeImage | DecodePreview | None:
        """A finished picture, or else the preview that has waited the longest."""
        return self._to_decode[0] if self._to_decode else next(iter(self._previews.values()), None)

    def _advance_leader(self, leader: _Entry, ranked: list[_Entry]) -> Work:
        needed, work = self._next_phase(leader)
        if self._free_bytes() >= needed:
            return work
        holders = [entry for entry in ranked if entry.prefix_bytes and entry is not leader]
        return DropPrefix(holders[-1].request.request_id)  # there is one: see `_may_start`

    def _joining(self, leader: _Entry, ranked: list[_Entry], may_encode: bool) -> Work | None:
        """The encode or prefill of the first request that could join the leader's batch, if memory is free for it."""
        for entry in self._riders(leader, ranked, include_joining=True):
            if entry.phase is Phase.DENOISE:
                continue
            needed, work = self._next_phase(entry)
            if entry.phase is Phase.ENCODE:
                needed += self._memory.prefix_bytes(entry.request)
                if not may_encode or not self._may_start(entry):
                    return None
            return work if self._free_bytes() >= needed else None
        return None

    def _fill(self, leader: _Entry, ranked: list[_Entry]) -> _Batch:
        batch: _Batch = []
        rows = tokens = 0
        for entry in self._riders(leader, ranked):
            for image_index in entry.unfinished():
                rows += entry.rows_per_sample
                tokens += entry.tokens_per_sample
                if batch and (rows > self._limits.max_batch_rows or tokens > self._limits.token_budget):
                    return batch
                batch.append((entry, image_index))
        return batch

    def _riders(self, leader: _Entry, ranked: list[_Entry], include_joining: bool = False) -> Iterator[_Entry]:
        """The leader, then requests that may share its step, in order, while rows and tokens last."""
        yield leader
        if leader.alone:
            return
        num_samples = sum(1 for _ in leader.unfinished())
        rows, tokens = num_samples * leader.rows_per_sample, num_samples * leader.tokens_per_sample
        for entry in ranked:
            if entry.phase is not Phase.DENOISE and not include_joining:
                continue
            if entry is leader or entry.alone or entry.key != leader.key:
                continue
            rows += entry.rows_per_sample
            tokens += entry.tokens_per_sample
            if rows > self._limits.max_batch_rows or tokens > self._limits.token_budget:
                return
            yield entry

    def _next_phase(self, entry: _Entry) -> tuple[int, Work]:
        """The bytes that the entry's next item takes, and the item."""
        if entry.phase is Phase.ENCODE:
            return self._memory.state_bytes(entry.request), EncodePrompt(entry.request.request_id)
        return self._memory.prefix_bytes(entry.request), Prefill(entry.request.request_id)

    def _free_bytes(self) -> int:
        return self._memory.budget_bytes - self.held_bytes

    def _advance(self, sample: Sample) -> None:
        entry = self._entries.get(sample.request_id)
        if entry is None:
            return
        step = entry.steps_done[sample.image_index] = entry.steps_done[sample.image_index] + 1
        picture = (sample.request_id, sample.image_index)
        if step in entry.request.preview_steps:
            self._previews[picture] = DecodePreview(*picture, step)
            entry.decodes_left -= 1
        if step == entry.num_steps:
            self._is_stale = True  # one less in the batch
            self._previews.pop(picture, None)
            self._to_decode.append(DecodeImage(*picture))
        entry.steps_left -= 1
        if not entry.steps_left:
            entry.prefix_bytes = 0  # the runner has let go of it as well
        if entry.remaining_s <= entry.rank_ends_s:
            self._moved(entry)

    def _finish_image(self, entry: _Entry, work: DecodeImage) -> tuple[str, ...]:
        self._to_decode.remove(work)
        entry.decoded += 1
        entry.decodes_left -= 1
        if entry.decoded < entry.request.num_images:
            self._moved(entry)
            return ()
        del self._entries[work.request_id]
        return (work.request_id,)
