"""The engine as the rest of the service sees it: submit params, await pictures.

Admission, CPU preprocessing and results live on the asyncio side; the device lives in the worker. The engine keeps
every admitted request until its answer is out or its client is gone.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.errors import EngineStopped, GenerationFailed, NotReady, QueueFull
from engine.prepare import MAX_CONDITION_IMAGES, MAX_PROMPT_TOKENS, Admission, Preparer
from engine.request import GeneratedImage, GenerationParams, GenerationResult, ModelCard, Progress
from engine.runner import Runner
from engine.worker import (
    Abort,
    Event,
    ImageReady,
    RequestFailed,
    StepDone,
    Stop,
    Submit,
    Worker,
    WorkerFailed,
    WorkerReady,
)
from models.checkpoint import find_checkpoint
from models.errors import CheckpointError
from models.image_model import CheckpointConfigs, ImageModel, resolve_device, resolve_dtype

LOADING_RETRY_S = 5.0
QUEUE_RETRY_S = 1.0


class EngineState(enum.StrEnum):
    """Where the engine is in its life; only `READY` admits requests."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(slots=True)
class _Pending:
    """An admitted request until it is answered."""

    admission: Admission
    done: asyncio.Future[None]
    on_progress: Callable[[Progress], None] | None
    pictures: dict[int, np.ndarray] = field(default_factory=dict)
    started: bool = False


class Engine:
    """One checkpoint on one device. Create, `start`, `generate` from any number of tasks, `stop`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._state = EngineState.LOADING
        self._failure: str | None = None
        self._card: ModelCard | None = None
        self._preparer: Preparer | None = None
        self._worker: Worker | None = None
        self._pending: dict[str, _Pending] = {}
        self._serial = itertools.count()
        self._num_preparing = 0

    def __repr__(self) -> str:
        return f"<Engine {self._state}: {self.num_running} running, {self.num_waiting} waiting>"

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> str | None:
        """Why the engine could not start, for the operator; None unless `state` is `FAILED`."""
        return self._failure

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise NotReady("The model is loading.", retry_after_s=LOADING_RETRY_S)
        return self._card

    @property
    def num_running(self) -> int:
        return sum(pending.started for pending in self._pending.values())

    @property
    def num_waiting(self) -> int:
        return len(self._pending) - self.num_running + self._num_preparing

    async def start(self) -> None:
        """Read the configs, load the weights and return when requests can be served. `CheckpointError` says what is
        wrong with the checkpoint."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        try:
            configs, self._preparer = await asyncio.to_thread(self._read_configs)

            def deliver(event: Event) -> None:
                loop.call_soon_threadsafe(self._on_event, event, ready)

            self._worker = Worker(lambda: self._load(configs), self._config.max_batch_rows, deliver)
            self._worker.start()
            await ready
        except Exception as error:
            self._state, self._failure = EngineState.FAILED, str(error) or type(error).__name__
            raise
        if self._state is EngineState.LOADING:
            self._state = EngineState.READY

    def _read_configs(self) -> tuple[CheckpointConfigs, Preparer]:
        folder: Path = find_checkpoint(self._config.model)
        configs = CheckpointConfigs.read(folder)
        index = configs.index
        fixed = index.sample_sigmas is not None
        self._card = ModelCard(
            name=self._config.model,
            max_condition_images=MAX_CONDITION_IMAGES,
            default_resolution_px=self._config.default_resolution_px or index.output_resolution,
            default_num_steps=index.default_num_steps
            if fixed
            else self._config.default_num_steps or index.default_num_steps,
            fixed_num_steps=fixed,
            size_multiple_px=configs.size_multiple_px,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
        )
        return configs, Preparer(configs, self._card)

    def _load(self, configs: CheckpointConfigs) -> Runner:
        device = resolve_device(self._config.device)
        return Runner(ImageModel.load(configs, device, resolve_dtype(self._config.dtype, device)))

    async def stop(self, drain_s: float) -> None:
        """Admit nothing more, give what was admitted up to `drain_s` seconds, then fail the rest and stop."""
        if self._state is not EngineState.FAILED:
            self._state = EngineState.DRAINING
        waiting = [pending.done for pending in self._pending.values()]
        if waiting and drain_s > 0:
            await asyncio.wait(waiting, timeout=drain_s)
        for request_id in list(self._pending):
            self._fail(request_id, EngineStopped("The service stopped before this request was finished."))
        if self._worker is not None:
            self._worker.send(Stop())
            await asyncio.to_thread(self._worker.join)
        if self._state is not EngineState.FAILED:
            self._state = EngineState.STOPPED

    async def generate(
        self,
        params: GenerationParams,
        *,
        request_id: str,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> GenerationResult:
        """Generate every picture of one request. Cancelling the awaiting task aborts the request: its place in the
        queue and its memory are free before the next item of work.

        Raises the errors of `engine.errors`.
        """
        worker, preparer = self._admitting()
        request_id = f"{request_id}#{next(self._serial)}"  # clients may send one id twice; neighbours must not mix
        self._num_preparing += 1
        try:
            admission = await asyncio.to_thread(preparer.prepare, params, request_id)
        finally:
            self._num_preparing -= 1
        if self._state is not EngineState.READY:
            raise NotReady("The service is stopping.", retry_after_s=LOADING_RETRY_S)
        done = asyncio.get_running_loop().create_future()
        pending = self._pending[request_id] = _Pending(admission, done, on_progress)
        worker.send(Submit(admission.request))
        try:
            await done
        except asyncio.CancelledError:
            worker.send(Abort(request_id))
            raise
        finally:
            self._pending.pop(request_id, None)
        return _result(pending)

    def _admitting(self) -> tuple[Worker, Preparer]:
        if self._state is not EngineState.READY or self._worker is None or self._preparer is None:
            raise NotReady(f"The service is not ready: it is {self._state}.", retry_after_s=LOADING_RETRY_S)
        if len(self._pending) + self._num_preparing >= self._config.max_queue:
            raise QueueFull("The queue is full.", retry_after_s=QUEUE_RETRY_S)
        return self._worker, self._preparer

    def _on_event(self, event: Event, ready: asyncio.Future[None]) -> None:
        match event:
            case WorkerReady():
                if not ready.done():
                    ready.set_result(None)
            case WorkerFailed(message):
                if not ready.done():
                    ready.set_exception(CheckpointError(message))
            case RequestFailed(request_id, code, message):
                self._fail(request_id, GenerationFailed(message, code=code))
            case StepDone() | ImageReady():
                if pending := self._pending.get(event.request_id):
                    self._advance(pending, event)

    def _advance(self, pending: _Pending, event: StepDone | ImageReady) -> None:
        request = pending.admission.request
        pending.started = True
        if isinstance(event, StepDone):
            if pending.on_progress is not None:
                pending.on_progress(Progress(event.image_index, event.step, request.num_steps))
            return
        pending.pictures[event.image_index] = event.pixels
        if len(pending.pictures) == request.num_images and not pending.done.done():
            pending.done.set_result(None)

    def _fail(self, request_id: str, error: Exception) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and not pending.done.done():
            pending.done.set_exception(error)


def _result(pending: _Pending) -> GenerationResult:
    request = pending.admission.request
    images = tuple(GeneratedImage(pending.pictures[index], seed) for index, seed in enumerate(request.seeds))
    return GenerationResult(images, pending.admission.usage, request.num_steps, pending.admission.warnings)
