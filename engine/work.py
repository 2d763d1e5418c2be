"""The items of work that the scheduler hands out and the runner executes; each is one quantum of the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.batching import BatchKey


@dataclass(frozen=True, slots=True)
class EncodePrompt:
    """Run the text and vision encoders and the VAE encoder for one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Fill the prefix KV of every CFG branch of one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """Give up a waiting request's prefix KV to make room; it is prefilled again when its turn comes."""

    request_id: str


class Sample(NamedTuple):
    """One picture of one request, about to take step `step` (0-based). A tuple: each step makes and sends several."""

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


@dataclass(frozen=True, slots=True)
class DecodePreview:
    """Decode the clean estimate that was kept of one picture after its first `step` steps."""

    request_id: str
    image_index: int
    step: int


Work = EncodePrompt | Prefill | DropPrefix | DenoiseStep | DecodeImage | DecodePreview


def request_ids(work: Work) -> tuple[str, ...]:
    """The requests that an item of work is for, without repetition."""
    if isinstance(work, DenoiseStep):
        return tuple(dict.fromkeys(sample.request_id for sample in work.samples))
    return (work.request_id,)
