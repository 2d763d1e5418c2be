"""The loop that owns the device: drain commands, ask the scheduler for one item of work, run it, report.

Commands come in by one queue, events go out by one callback; no tensor crosses. The loop runs in a thread here. It
knows nothing of asyncio or HTTP, and everything it is told and tells is plain data.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.errors import GenerationFailed
from engine.request import PreparedRequest
from engine.runner import Runner
from engine.scheduler import DecodeImage, DenoiseStep, Scheduler, Work, request_ids
from models.errors import CheckpointError

log = logging.getLogger(__name__)


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
    """The weights are loaded and the loop is running."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker could not start, and says why."""

    message: str


@dataclass(frozen=True, slots=True)
class StepDone:
    """One image of a request has finished `step` of its steps."""

    request_id: str
    image_index: int
    step: int


@dataclass(frozen=True, slots=True)
class ImageReady:
    """One picture of a request, (height, width, 4) uint8."""

    request_id: str
    image_index: int
    pixels: np.ndarray


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request failed; the message is fit for its client."""

    request_id: str
    code: str
    message: str


Event = WorkerReady | WorkerFailed | StepDone | ImageReady | RequestFailed


class Worker:
    """A worker in a thread of this process. `load` builds the runner; it is called in that thread."""

    def __init__(self, load: Callable[[], Runner], max_batch_rows: int, emit: Callable[[Event], None]) -> None:
        self._load = load
        self._scheduler = Scheduler(max_batch_rows)
        self._emit = emit
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="easel-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """Hand over a command; it takes effect before the next item of work."""
        self._commands.put(command)

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            runner = self._load()
        except CheckpointError as error:
            self._emit(WorkerFailed(str(error)))
            return
        except Exception as error:
            log.exception("the worker could not load the model")
            self._emit(WorkerFailed(f"the model could not be loaded: {error}"))
            return
        self._emit(WorkerReady())
        while self._take_commands(runner):
            work = self._scheduler.next_work()
            if work is not None:
                self._execute(runner, work)

    def _take_commands(self, runner: Runner) -> bool:
        """Apply every waiting command; waits for one when there is nothing to do. False means stop."""
        block = len(self._scheduler) == 0
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            match command:
                case Submit(request):
                    self._scheduler.add(request)
                    runner.add(request)
                case Abort(request_id):
                    self._forget(runner, request_id)
                case Stop():
                    return False

    def _execute(self, runner: Runner, work: Work) -> None:
        try:
            picture = runner.run(work)
        except Exception as error:  # whatever one item of work raises must not end the loop
            self._fail(runner, work, error)
            return
        finished = self._scheduler.complete(work)
        if isinstance(work, DenoiseStep):
            for sample in work.samples:
                self._emit(StepDone(sample.request_id, sample.image_index, sample.step + 1))
        elif isinstance(work, DecodeImage) and picture is not None:
            self._emit(ImageReady(work.request_id, work.image_index, picture))
        for request_id in finished:
            runner.remove(request_id)

    def _fail(self, runner: Runner, work: Work, error: Exception) -> None:
        if isinstance(error, GenerationFailed):
            code, message = error.code, error.message
        else:
            log.exception("%s failed", type(work).__name__)
            code, message = "internal_error", "The request failed inside the engine."
        for request_id in request_ids(work):
            self._forget(runner, request_id)
            self._emit(RequestFailed(request_id, code, message))

    def _forget(self, runner: Runner, request_id: str) -> None:
        self._scheduler.remove(request_id)
        runner.remove(request_id)
