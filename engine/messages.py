"""What crosses between the API process and the worker. Plain data: no tensor, no future, no callback, and nothing of a
module that imports torch, which the API process would import to unpack it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.cost_model import CostModel
from engine.memory import MemoryModel
from engine.request import PreparedRequest
from engine.work import Work

DISK_FULL = "disk_full"  # a code of `RequestFailed` that is nobody's fault and may pass


@dataclass(frozen=True, slots=True)
class Submit:
    """Take a request in."""

    request: PreparedRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request, whatever state it is in."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop."""


Command = Submit | Abort | Stop


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The weights are loaded, the profile is taken and the loop is running."""

    cost_model: CostModel
    memory: MemoryModel
    token_budget: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker could not start, and says why."""

    message: str


@dataclass(frozen=True, slots=True)
class WorkDone:
    """An item of work is over. `rows` and `tokens` are those of a denoise step, else 0. `shortcut` says what became of
    the item's way to be faster: a denoise step's graph (`models.decoding.GraphResult`), or whether an encode found its
    prompt in the cache ("hit" or "miss")."""

    work: Work
    seconds: float
    rows: int = 0
    tokens: int = 0
    shortcut: str = ""


@dataclass(frozen=True, slots=True)
class ImageReady:
    """One picture of a request, (height, width, 4) uint8."""

    request_id: str
    image_index: int
    pixels: np.ndarray


@dataclass(frozen=True, slots=True)
class PreviewReady:
    """What one picture of a request looked like after `step` steps, (height, width, 4) uint8."""

    request_id: str
    image_index: int
    step: int
    pixels: np.ndarray


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request failed; the message is fit for its client."""

    request_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OutOfMemoryRetried:
    """The device ran out of memory, and the same work is tried again in smaller pieces."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the worker's allocator holds of the device, in bytes; told about once a second while there is work."""

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int


Event = (
    WorkerReady
    | WorkerFailed
    | WorkDone
    | ImageReady
    | PreviewReady
    | RequestFailed
    | OutOfMemoryRetried
    | DeviceMemory
)
