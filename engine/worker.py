"""The loop that owns the device: drain commands, ask the scheduler for one item of work, run it, report.

The loop knows nothing of processes, asyncio or HTTP: commands come from a queue, events go to a callback. `engine.host`
runs it in a process of its own or in a thread.
"""

from __future__ import annotations

import errno
import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.cost_model import Measurement, Size, WorkKind, decode_size, encode_size, prefill_size, step_size
from engine.errors import DeviceLost, DeviceOutOfMemory, GenerationFailed
from engine.messages import (
    DISK_FULL,
    Abort,
    Command,
    Event,
    ImageReady,
    OutOfMemoryRetried,
    PreviewReady,
    RequestFailed,
    Stop,
    Submit,
    WorkDone,
    WorkerReady,
)
from engine.request import PreparedRequest
from engine.scheduler import Limits, Scheduler
from engine.work import DecodeImage, DecodePreview, DenoiseStep, EncodePrompt, Prefill, Sample, Work, request_ids

if TYPE_CHECKING:
    from engine.runner import Runner

log = logging.getLogger(__name__)

MEMORY_INTERVAL_S = 1.0
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
OUT_OF_MEMORY = "This request does not fit the device's memory."
LATE = "The request could not be finished within its time limit."

NO_SIZE = Size(0)


@dataclass(slots=True)
class _Item:
    """An item of work and what is told about it once it is done."""

    work: Work
    kind: WorkKind | None = None
    size: Size = NO_SIZE
    rows: int = 0
    tokens: int = 0
    shortcut: str = ""


class WorkerLoop:
    """Runs until `Stop`. An exception out of `run` means that the device is lost and the worker must be replaced.

    `emit` must not block: no step waits for a picture to be copied, or for whoever reads. `note_active` is called with
    the requests that an item of work is for before it runs, and with none after it.
    """

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        commands: queue.SimpleQueue[Command],
        emit: Callable[[Event], None],
        note_active: Callable[[tuple[str, ...]], None],
    ) -> None:
        profile = runner.profile(limits.max_batch_rows)
        self._runner = runner
        self._costs = profile.cost_model
        self._scheduler = Scheduler(
            replace(limits, token_budget=min(limits.token_budget, profile.token_budget)), self._costs, profile.memory
        )
        self._requests: dict[str, PreparedRequest] = {}
        self._step_sizes: dict[str, Size] = {}
        self._commands = commands
        self._emit = emit
        self._note_active = note_active
        self._started: deque[_Item] = deque()  # steps
        self._memory_told_s = float("-inf")
        emit(WorkerReady(self._costs.copy(), profile.memory, profile.token_budget))
        self._tell_memory()

    def run(self) -> None:
        while self._take_commands():
            for request_id in self._scheduler.expired(time.monotonic()):
                self._fail(request_id, "deadline_exceeded", LATE)
            if (work := self._scheduler.next_work(time.monotonic())) is not None:
                self._execute(work)

    def _take_commands(self) -> bool:
        """Apply every waiting command; waits for one when there is nothing to do. False means stop."""
        if block := len(self._scheduler) == 0:
            self._finish_steps()
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            match command:
                case Submit(request):
                    self._admit(request)
                case Abort(request_id):
                    self._forget(request_id)
                case Stop():
                    return False

    def _admit(self, request: PreparedRequest) -> None:
        if not self._scheduler.fits(request):
            self._emit(RequestFailed(request.request_id, "out_of_memory", OUT_OF_MEMORY))
            return
        self._requests[request.request_id] = request
        self._step_sizes[request.request_id] = step_size(request)
        self._scheduler.add(request)
        self._runner.add(request)

    def _execute(self, work: Work, retried: bool = False) -> None:
        """Run one item and report it. Whatever it raises ends the requests it is for, and nothing else.

        Where the runner can, a step is only started, and the one before it waited for: the device always has the next
        one at hand. Everything else waits until all steps are done.
        """
        ahead = isinstance(work, DenoiseStep) and self._runner.runs_ahead
        if not ahead:
            self._finish_steps()
        item = self._item(work)
        ids = request_ids(work)
        if self._started:
            ids = tuple(dict.fromkeys(i for one in (*self._started, item) for i in request_ids(one.work)))
        self._note_active(ids)
        started_s = time.monotonic()
        picture = None
        try:
            if isinstance(work, DenoiseStep) and ahead:
                self._runner.start(work)
            else:
                picture = self._runner.run(work)
            seconds = time.monotonic() - started_s
        except DeviceLost:
            raise
        except DeviceOutOfMemory:
            self._retry_smaller(work, retried)
            return
        except GenerationFailed as error:
            self._blame(work, error.code, error.message)
            return
        except Exception as error:
            log.exception("%s failed", type(work).__name__)
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:  # a kernel that could not be compiled
                self._blame(work, DISK_FULL, "The service can't write to its disk at the moment.")
            else:
                self._blame(work, "internal_error", "The request failed inside the engine.")
            return
        item.shortcut = self._runner.shortcut
        if ahead:
            self._started.append(item)
            self._scheduler.complete(work)
            self._finish_steps(but=1)
            return
        self._note_active(())
        self._report(item, seconds)
        if isinstance(work, DecodeImage) and picture is not None:
            self._emit(ImageReady(work.request_id, work.image_index, picture))
        if isinstance(work, DecodePreview) and picture is not None:
            self._emit(PreviewReady(work.request_id, work.image_index, work.step, picture))
        for request_id in self._scheduler.complete(work):
            self._forget(request_id)

    def _finish_steps(self, but: int = 0) -> None:
        """Wait for the steps that were started, `but` for the last ones, and report them."""
        while len(self._started) > but:
            seconds = self._runner.finish()
            self._report(self._started.popleft(), seconds)
            if not self._started:
                self._note_active(())

    def _item(self, work: Work) -> _Item:
        """An item as it is reported once it is done, when its requests may be gone."""
        request = self._requests[request_ids(work)[0]]
        match work:
            case EncodePrompt():
                return _Item(work, WorkKind.ENCODE, encode_size(request))
            case Prefill():
                return _Item(work, WorkKind.PREFILL, prefill_size(request))
            case DecodeImage() | DecodePreview():
                return _Item(work, WorkKind.DECODE, decode_size(request))
            case DenoiseStep():
                sizes = [self._step_sizes[sample.request_id] for sample in work.samples]
                tokens = sum([size.tokens for size in sizes])
                size = Size(tokens, context=sum([size.context for size in sizes]) // len(sizes))
                return _Item(work, WorkKind.STEP, size, tokens // request.target_grid.num_tokens, tokens)
        return _Item(work)

    def _report(self, item: _Item, seconds: float) -> None:
        """Tell of an item that is done, and learn from the time that it took."""
        if item.kind is not None:
            self._costs.correct(Measurement(item.kind, item.size, seconds))
        self._emit(WorkDone(item.work, seconds, item.rows, item.tokens, item.shortcut))
        self._tell_memory()

    def _tell_memory(self) -> None:
        now_s = time.monotonic()
        if now_s - self._memory_told_s >= MEMORY_INTERVAL_S and (memory := self._runner.device_memory()):
            self._memory_told_s = now_s
            self._emit(memory)

    def _retry_smaller(self, work: Work, retried: bool) -> None:
        """Out of memory: once more in halves, or, for a single request, with everything else given up."""
        self._finish_steps()
        self._runner.free_caches()
        if isinstance(work, DenoiseStep) and len(work.samples) > 1:
            self._scheduler.reduce_budget(work)
            self._emit(OutOfMemoryRetried())
            half = len(work.samples) // 2
            for samples in (work.samples[:half], work.samples[half:]):
                self._execute_part(work, samples)
        elif retried:
            self._fail(request_ids(work)[0], "out_of_memory", OUT_OF_MEMORY)
        else:
            self._emit(OutOfMemoryRetried())
            for drop in self._scheduler.droppable(keep=request_ids(work)):
                self._runner.run(drop)
                self._scheduler.complete(drop)
            self._execute(work, retried=True)

    def _blame(self, work: Work, code: str, message: str) -> None:
        """Fail the request that an item was for. In a batch each request is tried by itself first."""
        ids = request_ids(work)
        if len(ids) == 1 or not isinstance(work, DenoiseStep):
            self._fail(ids[0], code, message)
            return
        for request_id in ids:
            self._execute_part(work, tuple(sample for sample in work.samples if sample.request_id == request_id))

    def _execute_part(self, step: DenoiseStep, samples: tuple[Sample, ...]) -> None:
        """A part of a batch, of which requests may have failed by now."""
        left = tuple(sample for sample in samples if sample.request_id in self._requests)
        if left:
            self._execute(replace(step, samples=left))

    def _fail(self, request_id: str, code: str, message: str) -> None:
        self._forget(request_id)
        self._emit(RequestFailed(request_id, code, message))

    def _forget(self, request_id: str) -> None:
        self._scheduler.remove(request_id)
        self._runner.remove(request_id)
        self._requests.pop(request_id, None)
        self._step_sizes.pop(request_id, None)
