"""Decides what the GPU does next. Pure state: no torch, no clock, no thread; it returns work and does none.

A request passes `encode → prefill → denoise steps → decode`. The unit is the step, not the request: every call of
`next_work` returns exactly one item, and a request that arrives while others are denoising joins them at the next
step boundary, at whatever step they are.

Policy: first come, first served, one batch key at a time. The oldest unfinished request names the key; requests with
that key share its steps up to `max_batch_rows`; finished pictures are decoded before anything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.batching import BatchKey
from engine.request import PreparedRequest


@dataclass(frozen=True, slots=True)
class EncodePrompt:
    """Run the text and vision encoders and the VAE encoder for one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Fill the prefix KV of every CFG branch of one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture of one request, about to take step `step` (0-based)."""

    request_id: str
    image_index: int
    step: int


@dataclass(frozen=True, slots=True)
class DenoiseStep:
    """Advance every sample by one step of its own schedule; all share `key`."""

    key: BatchKey
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class DecodeImage:
    """Decode the finished latents of one picture."""

    request_id: str
    image_index: int


Work = EncodePrompt | Prefill | DenoiseStep | DecodeImage


def request_ids(work: Work) -> tuple[str, ...]:
    """The requests that an item of work is for, without repetition."""
    if isinstance(work, DenoiseStep):
        return tuple(dict.fromkeys(sample.request_id for sample in work.samples))
    return (work.request_id,)


class Phase(Enum):
    """What a request needs next."""

    ENCODE = auto()
    PREFILL = auto()
    DENOISE = auto()


@dataclass(slots=True)
class _Entry:
    request: PreparedRequest
    phase: Phase = Phase.ENCODE
    steps_done: list[int] = field(default_factory=list)  # per image
    decoded: int = 0

    def unfinished_samples(self) -> Iterator[Sample]:
        for image_index, step in enumerate(self.steps_done):
            if step < self.request.num_steps:
                yield Sample(self.request.request_id, image_index, step)


class Scheduler:
    """All requests of one worker, in order of arrival."""

    def __init__(self, max_batch_rows: int) -> None:
        self._max_batch_rows = max_batch_rows
        self._entries: dict[str, _Entry] = {}
        self._to_decode: deque[DecodeImage] = deque()

    def __repr__(self) -> str:
        phases = [entry.phase.name for entry in self._entries.values()]
        counts = ", ".join(f"{phases.count(phase.name)} {phase.name.lower()}" for phase in Phase)
        return f"<Scheduler: {counts}, {len(self._to_decode)} to decode>"

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: PreparedRequest) -> None:
        """Take a request in, behind everything that is there."""
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id} is scheduled already")
        self._entries[request.request_id] = _Entry(request, steps_done=[0] * request.num_images)

    def remove(self, request_id: str) -> bool:
        """Forget a request in whatever state it is; False when it is not here."""
        self._to_decode = deque(work for work in self._to_decode if work.request_id != request_id)
        return self._entries.pop(request_id, None) is not None

    def next_work(self) -> Work | None:
        """The one thing to do now, or None when there is nothing."""
        if self._to_decode:
            return self._to_decode[0]
        samples: list[Sample] = []
        rows, key = 0, None
        for request_id, entry in self._entries.items():
            if key is None:
                key = entry.request.batch_key
            elif entry.request.batch_key != key:
                continue
            for sample in entry.unfinished_samples():
                if samples and rows + entry.request.num_branches > self._max_batch_rows:
                    return DenoiseStep(key, tuple(samples))
                if entry.phase is Phase.ENCODE:
                    return EncodePrompt(request_id)
                if entry.phase is Phase.PREFILL:
                    return Prefill(request_id)
                samples.append(sample)
                rows += entry.request.num_branches
        return DenoiseStep(key, tuple(samples)) if key is not None and samples else None

    def complete(self, work: Work) -> tuple[str, ...]:
        """Record that `work` was done; returns the requests that are thereby finished and forgotten."""
        if isinstance(work, DenoiseStep):
            for sample in work.samples:
                self._advance(sample)
            return ()
        entry = self._entries.get(work.request_id)
        if entry is None:
            return ()
        if isinstance(work, EncodePrompt):
            entry.phase = Phase.PREFILL
        elif isinstance(work, Prefill):
            entry.phase = Phase.DENOISE
        else:
            self._to_decode.remove(work)
            entry.decoded += 1
            if entry.decoded == entry.request.num_images:
                del self._entries[work.request_id]
                return (work.request_id,)
        return ()

    def _advance(self, sample: Sample) -> None:
        entry = self._entries.get(sample.request_id)
        if entry is None:
            return
        entry.steps_done[sample.image_index] += 1
        if entry.steps_done[sample.image_index] == entry.request.num_steps:
            self._to_decode.append(DecodeImage(sample.request_id, sample.image_index))
