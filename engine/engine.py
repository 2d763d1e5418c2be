"""The engine as the rest of the service sees it: submit params, await pictures.

Admission, CPU preprocessing and results live on the asyncio side; the device lives in the worker. The engine keeps
every admitted request until its answer is out or its client is gone, so a worker can die at any time: its successor
gets all of them again, from the start, with the same seeds. A request under whose work two workers died fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.cost_model import CostModel
from engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    GenerationFailed,
    NotReady,
    QueueFull,
    RequestCancelled,
)
from engine.host import LoadRunner
from engine.loading import in_detached_thread, load_preparer, load_runner, model_card, read_configs
from engine.messages import (
    DISK_FULL,
    Abort,
    DeviceMemory,
    Event,
    ImageReady,
    OutOfMemoryRetried,
    PreviewReady,
    RequestFailed,
    Submit,
    WorkDone,
    WorkerReady,
)
from engine.pace import Pace, Share
from engine.pending import Pending
from engine.request import Admitted, GenerationParams, GenerationResult, ModelCard, RequestEvent, RequestStatus
from engine.scheduler import Limits, Policy
from engine.supervisor import Death, Supervisor
from engine.work import DenoiseStep, request_ids

if TYPE_CHECKING:
    from engine.prepare import Preparer

PREPARING_THREADS = 2  # each may hold a few large pictures
MAX_DEATHS = 2  # of workers under one request's work
DEFAULT_RETRY_S = 5.0
CAUTION = 1.5  # a factor of predicted waits
LATE = "The request could not be finished within its time limit."


class EngineState(enum.StrEnum):
    """Where the engine is in its life; only `READY` admits requests."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WorkerRestarted:
    """The worker died and a new one is being started."""


Observation = WorkDone | OutOfMemoryRetried | DeviceMemory | WorkerRestarted


class Engine:
    """One checkpoint on one device. Create, `start`, `generate` from any number of tasks, `stop`.

    `load` builds the runner inside the worker; by default it loads the configured checkpoint.
    """

    def __init__(self, config: EngineConfig, *, load: LoadRunner | None = None) -> None:
        self._config = config
        self._observe: Callable[[Observation], None] = lambda observation: None
        self._state = EngineState.LOADING
        self._failure: str | None = None
        self._card: ModelCard | None = None
        self._preparer: Preparer | None = None
        self._costs = CostModel()
        self._pace = Pace()
        self._pending: dict[str, Pending] = {}
        self._serial = itertools.count()
        self._num_admitted = 0
        # Idle OpenMP threads sleep instead of spinning: on a CPU that is shared (with this very process, or with others
        # in a container) spinning made a step 7 to 20 times slower. Read when torch is first imported, here or in the
        # worker, which inherits it.
        os.putenv("GOMP_SPINCOUNT", "0")
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="easel-prepare")
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_s = DEFAULT_RETRY_S
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._supervisor = Supervisor(
            load or functools.partial(load_runner, config),
            Limits(
                max_batch_rows=config.max_batch_rows,
                max_stretch=config.max_stretch,
                policy=Policy(config.policy),
            ),
            in_process=config.worker == "process",
            hang_timeout_s=config.hang_timeout_s,
            on_event=self._on_event,
            on_death=self._on_death,
            on_give_up=self._give_up,
            is_busy=lambda: bool(self._pending),
        )

    def __repr__(self) -> str:
        return f"<Engine {self._state}: {self.num_running} running, {self.num_waiting} waiting>"

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> str | None:
        """Why the engine can't serve, for the operator; None unless `state` is `FAILED`."""
        return self._failure

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise NotReady("The model is loading.", retry_after_s=DEFAULT_RETRY_S)
        return self._card

    @property
    def num_running(self) -> int:
        return sum(pending.started for pending in self._pending.values())

    @property
    def num_waiting(self) -> int:
        return self._num_admitted - self.num_running

    @property
    def backlog_s(self) -> float:
        """Predicted time until everything that was admitted is done."""
        return max(self._pace.done_s([share for _, share in self._in_order()]), default=0.0)

    @property
    def worker_pid(self) -> int | None:
        return self._supervisor.worker_pid

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason when a worker can't be replaced and the engine gives up."""
        self._on_failure = callback

    def on_observation(self, callback: Callable[[Observation], None]) -> None:
        """Call `callback` with every item of work that was done, for metrics."""
        self._observe = callback

    def launch(self) -> None:
        """Let the worker begin to load, ahead of `start`, which returns the sooner. Needs no event loop."""
        self._supervisor.launch()

    async def start(self) -> None:
        """Read the configs, load the weights and return when requests can be served. `CheckpointError` says what is
        wrong with the checkpoint."""
        started_s = time.monotonic()
        try:
            configs = await in_detached_thread(functools.partial(read_configs, self._config))
            card = self._card = model_card(self._config, configs)
            preparer = in_detached_thread(functools.partial(load_preparer, configs, card))
            self._preparer, _ = await asyncio.gather(preparer, self._supervisor.start())
        except Exception as error:
            self._state, self._failure = EngineState.FAILED, str(error) or type(error).__name__
            raise
        self._load_s = time.monotonic() - started_s
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY

    async def stop(self, drain_s: float) -> None:
        """Admit nothing more, give what was admitted up to `drain_s` seconds, then fail the rest and stop."""
        if self._state not in (EngineState.FAILED, EngineState.STOPPED):
            self._state = EngineState.DRAINING
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_s)
        for pending in list(self._pending.values()):
            _fail(pending, EngineStopped("The service stopped before this request was finished."))
        await self._supervisor.stop()
        self._preparing.shutdown(wait=False, cancel_futures=True)
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED

    async def generate(
        self,
        params: GenerationParams | Callable[[], GenerationParams],
        *,
        request_id: str,
        prefetch: Callable[[], Awaitable[None]] | None = None,
        on_event: Callable[[RequestEvent], None] = lambda event: None,
    ) -> GenerationResult:
        """Generate every picture of one request. Cancelling the awaiting task aborts the request: its place in the
        queue and its memory are free before the next item of work.

        `params` may be a function that makes them: it is called in a thread, after admission and few at a time, and
        what it raises comes out here. So pictures are decoded only for requests that have a place, and nobody holds
        them once they are resized. `prefetch` is awaited before that, for what takes time but no thread.

        `on_event` is called on the event loop with what happens on the way. Nothing that can be known from the request
        itself is raised any more once it has been told that the request is `Admitted`.

        `request_id` is what `status` and `cancel` know the request by; of several with one id they mean the newest.
        Raises the errors of `engine.errors`.
        """
        preparer = self._admitting()
        self._num_admitted += 1
        self._idle.clear()
        try:
            arrived_s = time.monotonic()
            if prefetch is not None:
                await prefetch()
                self._refuse_if_over()
            return await self._generate(preparer, params, request_id, arrived_s, on_event)
        finally:
            self._num_admitted -= 1
            if self._num_admitted == 0:
                self._idle.set()

    async def _generate(
        self,
        preparer: Preparer,
        params: GenerationParams | Callable[[], GenerationParams],
        request_id: str,
        arrived_s: float,
        on_event: Callable[[RequestEvent], None],
    ) -> GenerationResult:
        key = f"{request_id}#{next(self._serial)}"  # clients may send one id twice; neighbours must not mix
        loop = asyncio.get_running_loop()
        admission = await loop.run_in_executor(self._preparing, preparer.prepare, params, key, arrived_s)
        request, deadline_s = admission.request, admission.request.deadline_s
        if deadline_s is not None and time.monotonic() + self._costs.isolated_s(request) > deadline_s:
            raise DeadlineExceeded("The request can't be finished within its time limit.")
        pending = Pending(request_id, request, admission, loop.create_future(), on_event)
        self._pending[key] = pending
        self._supervisor.send(Submit(request))
        try:
            on_event(Admitted(admission.usage, request.num_steps, admission.warnings))
            async with asyncio.timeout(None if deadline_s is None else deadline_s - time.monotonic()):
                await pending.done
        except TimeoutError:
            raise DeadlineExceeded(LATE) from None
        finally:
            del self._pending[key]
            if len(pending.pictures) < request.num_images:
                self._supervisor.send(Abort(key))
        return pending.result()

    def status(self, request_id: str) -> RequestStatus | None:
        """Where a request is; None when it is not (or no longer) here."""
        pending = self._find(request_id)
        if pending is None:
            return None
        in_order = self._in_order()
        position = next(number for number, (other, _) in enumerate(in_order) if other is pending)
        before = in_order[:position]
        return RequestStatus(
            request_id=request_id,
            running=pending.started,
            position=0 if pending.started else 1 + sum(not other.started for other, _ in before),
            step=sum(pending.steps.values()),
            num_steps=pending.request.num_steps * pending.request.num_images,
            eta_s=self._pace.done_s([share for _, share in in_order[: position + 1]])[-1],
        )

    def cancel(self, request_id: str) -> bool:
        """Cancel a request by its id; whoever awaits it gets `RequestCancelled`. False when it is not here."""
        pending = self._find(request_id)
        if pending is not None:
            _fail(pending, RequestCancelled("The request was cancelled."))
        return pending is not None

    def _find(self, request_id: str) -> Pending | None:
        return next((p for p in reversed(self._pending.values()) if p.label == request_id), None)

    def _in_order(self) -> list[tuple[Pending, Share]]:
        """Pending requests and what is left of them, in the order in which they will probably be done."""
        shares = [(pending, pending.share(self._costs)) for pending in self._pending.values()]
        if self._config.policy == Policy.FCFS:
            return shares
        return sorted(shares, key=lambda entry: (-entry[0].request.priority, entry[1].work_s))

    def _admitting(self) -> Preparer:
        if self._state is not EngineState.READY or self._preparer is None:
            retry_after_s = self._load_s if self._state is EngineState.RESTARTING else DEFAULT_RETRY_S
            raise NotReady(f"The service is not ready: it is {self._state}.", retry_after_s=retry_after_s)
        if self._num_admitted >= self._config.max_queue:
            raise QueueFull("The queue is full.", retry_after_s=self._next_place_s())
        return self._preparer

    def _refuse_if_over(self) -> None:
        if self._state in (EngineState.STOPPED, EngineState.FAILED):
            raise EngineStopped("The service stopped before this request was finished.")

    def _next_place_s(self) -> float:
        """Time until a place in the queue is most probably free: who comes too early is only refused again."""
        return CAUTION * min(self._pace.done_s([share for _, share in self._in_order()]), default=1.0)

    def _on_event(self, event: Event) -> None:
        match event:
            case WorkerReady(cost_model):
                self._costs = cost_model
                if self._state is EngineState.RESTARTING:
                    self._state = EngineState.READY
                for pending in self._pending.values():
                    self._supervisor.send(Submit(pending.request))
            case WorkDone():
                self._observe(event)
                if isinstance(event.work, DenoiseStep):
                    stepping = self._of(tuple(sample.request_id for sample in event.work.samples))
                    self._pace.learn(event.seconds, [self._costs.step_s(pending.request) for pending in stepping])
                for pending in self._of(request_ids(event.work)):
                    pending.record(event)
            case ImageReady():
                for pending in self._of((event.request_id,)):
                    pending.receive(event)
            case PreviewReady():
                for pending in self._of((event.request_id,)):
                    pending.show(event)
            case RequestFailed():
                for pending in self._of((event.request_id,)):
                    _fail(pending, _error_of(event))
            case OutOfMemoryRetried() | DeviceMemory():
                self._observe(event)

    def _of(self, keys: tuple[str, ...]) -> Iterator[Pending]:
        return (self._pending[key] for key in keys if key in self._pending)

    def _on_death(self, death: Death) -> None:
        """Take everything back to its start. What may have caused the death runs alone from now on, or fails."""
        if self._state is EngineState.READY:
            self._state = EngineState.RESTARTING
        self._observe(WorkerRestarted())
        for pending in self._of(death.blamed):
            pending.deaths += 1
            if pending.deaths >= MAX_DEATHS:
                _fail(pending, GenerationFailed("This request made the worker fail.", code="worker_died"))
        for key, pending in self._pending.items():
            pending.restart(alone=key in death.blamed)

    def _give_up(self, reason: str) -> None:
        self._state, self._failure = EngineState.FAILED, reason
        for pending in self._pending.values():
            _fail(pending, EngineStopped("The service can't go on."))
        self._on_failure(reason)


def _fail(pending: Pending, error: Exception) -> None:
    if not pending.done.done():
        pending.done.set_exception(error)


def _error_of(event: RequestFailed) -> Exception:
    if event.code == "deadline_exceeded":
        return DeadlineExceeded(event.message)
    if event.code == DISK_FULL:
        return NotReady(event.message, retry_after_s=DEFAULT_RETRY_S)
    return GenerationFailed(event.message, code=event.code)
