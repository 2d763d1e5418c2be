"""A GPU that exists on a clock only, and the policies that drive it.

`simulate` is the worker's loop without a worker: take what has arrived, ask the policy for one item of work, let the
clock pass, report it done. Three policies answer: the engine's own `Scheduler`, unchanged, and two to compare it with.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from benchmarks import simulated_gpu as gpu
from benchmarks.outcomes import Outcome
from benchmarks.starvation import StarvationWatch
from benchmarks.traffic import GUIDANCE_SCALE, Arrival, Kind
from engine.cost_model import CostModel, Measurement, Size, WorkKind, decode_size, encode_size, prefill_size, step_size
from engine.request import PreparedRequest
from engine.scheduler import Limits, Scheduler
from engine.work import DecodeImage, DenoiseStep, DropPrefix, EncodePrompt, Prefill, Sample, Work
from models.inputs import ConditionImage, TokenizedPrompt
from models.layout import Grid, prefix_layout

NUM_STEPS = 40
MAX_QUEUE = 64  # unfinished requests; the engine's default
PX_PER_TOKEN = 16
CONDITION_SIDE_PX = 1024
PROFILE_SIDES_PX = (256, 512, 1024)
PROFILE_PROMPT_TOKENS = 48


class SchedulingPolicy(Protocol):
    """What `simulate` needs of a scheduler; `engine.scheduler.Scheduler` is one."""

    def __len__(self) -> int: ...

    def add(self, request: PreparedRequest) -> None: ...

    def next_work(self, now_s: float) -> Work | None: ...

    def complete(self, work: Work) -> tuple[str, ...]: ...


class RunToCompletion:
    """One request at a time, first come, first served."""

    max_batch = 1

    def __init__(self) -> None:
        self._waiting: deque[PreparedRequest] = deque()
        self._batch: dict[str, PreparedRequest] = {}
        self._plan: Iterator[Work] = iter(())
        self._work: Work | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._batch)

    def add(self, request: PreparedRequest) -> None:
        self._waiting.append(request)

    def next_work(self, now_s: float) -> Work | None:
        if self._work is None and (self._batch or self._waiting):
            if not self._batch:
                self._start_batch()
            self._work = next(self._plan)
        return self._work

    def complete(self, work: Work) -> tuple[str, ...]:
        self._work = None
        if not isinstance(work, DecodeImage) or work.image_index + 1 < self._batch[work.request_id].num_images:
            return ()
        del self._batch[work.request_id]
        return (work.request_id,)

    def _start_batch(self) -> None:
        """Take the oldest request and the next ones of its shape; whoever comes later waits for all of them."""
        key = self._waiting[0].batch_key
        members = [request for request in self._waiting if request.batch_key == key][: self.max_batch]
        self._batch = {request.request_id: request for request in members}
        self._waiting = deque(request for request in self._waiting if request.request_id not in self._batch)
        self._plan = _plan(members)


class Drain(RunToCompletion):
    """Batches of one shape, first come, first served; a late request waits until the batch before it has drained.
    Finished pictures leave as soon as they are decoded."""

    max_batch = 8


def _plan(members: list[PreparedRequest]) -> Iterator[Work]:
    for request in members:
        yield EncodePrompt(request.request_id)
        yield Prefill(request.request_id)
    pictures = [(request, image) for request in members for image in range(request.num_images)]
    for step in range(max(request.num_steps for request in members)):
        samples = tuple(
            Sample(request.request_id, image, step) for request, image in pictures if step < request.num_steps
        )
        yield DenoiseStep(members[0].batch_key, samples)
    for request, image in pictures:
        yield DecodeImage(request.request_id, image)


def make_request(request_id: str, kind: Kind, arrived_s: float, num_steps: int = NUM_STEPS) -> PreparedRequest:
    return PreparedRequest(
        request_id=request_id,
        prompts=(_prompt(kind.prompt_tokens, kind.num_condition_images),) * (1 + kind.guided),
        condition_images=_condition_images(kind.num_condition_images),
        target_grid=_grid(kind.side_px),
        crop=(slice(None), slice(None)),
        sigmas=_sigmas(num_steps),
        seeds=(0,),
        true_cfg_scale=GUIDANCE_SCALE if kind.guided else 1.0,
        arrived_s=arrived_s,
    )


def make_scheduler(seed: int, **limits: object) -> tuple[Scheduler, CostModel]:
    """The engine's scheduler with what a start-up profile would tell it."""
    kinds = [Kind(side_px, prompt_tokens=PROFILE_PROMPT_TOKENS) for side_px in PROFILE_SIDES_PX]
    costs, budget = gpu.profile([make_request(str(kind), kind, 0.0) for kind in kinds], seed)
    return Scheduler(Limits(**{"token_budget": budget, **limits}), costs), costs  # type: ignore[arg-type]


def isolated_s(kind: Kind) -> float:
    return gpu.isolated_s(make_request("", kind, 0.0))


def simulate(
    policy: SchedulingPolicy,
    arrivals: Sequence[Arrival],
    *,
    max_queue: int = MAX_QUEUE,
    costs: CostModel | None = None,
    watch: StarvationWatch | None = None,
) -> list[Outcome]:
    """Outcomes in the order of arrival. A request that finds `max_queue` unfinished ones is refused. `costs` is
    corrected by what is measured, as a worker does it."""
    requests = {
        str(index): make_request(str(index), arrival.kind, arrival.at_s) for index, arrival in enumerate(arrivals)
    }
    coming = deque(requests.values())
    measure = _Stopwatch(requests)
    finished_s: dict[str, float] = {}
    now_s = 0.0
    while coming or len(policy):
        while coming and coming[0].arrived_s <= now_s:
            request = coming.popleft()
            if len(policy) < max_queue:
                policy.add(request)
                if watch:
                    watch.add(request)
        if watch:
            watch.look(now_s)
        work = policy.next_work(now_s)
        if work is None:
            now_s = coming[0].arrived_s if coming else now_s
            continue
        measured = measure(work)
        now_s += measured.seconds
        if costs:
            costs.correct(measured)
        if watch:
            watch.done(work, measured.seconds)
        for request_id in policy.complete(work):
            finished_s[request_id] = now_s
            if watch:
                watch.remove(request_id, now_s)
    return [_outcome(request, finished_s.get(name)) for name, request in requests.items()]


def _outcome(request: PreparedRequest, finished_s: float | None) -> Outcome:
    isolated_s = gpu.isolated_s(request)
    if finished_s is None:
        return Outcome(request.arrived_s, request.arrived_s, isolated_s, status=429)
    return Outcome(request.arrived_s, finished_s, isolated_s)


class _Stopwatch:
    """Times items of work; a batch is computed once, however many steps it takes."""

    def __init__(self, requests: dict[str, PreparedRequest]) -> None:
        self._requests = requests
        self._steps: dict[tuple[str, ...], Measurement] = {}

    def __call__(self, work: Work) -> Measurement:
        match work:
            case DenoiseStep(_, samples):
                ids = tuple([sample.request_id for sample in samples])
                if ids not in self._steps:
                    self._steps[ids] = self._step([self._requests[request_id] for request_id in ids])
                return self._steps[ids]
            case EncodePrompt(request_id):
                request = self._requests[request_id]
                return Measurement(WorkKind.ENCODE, encode_size(request), gpu.encode_s(request))
            case Prefill(request_id):
                request = self._requests[request_id]
                return Measurement(WorkKind.PREFILL, prefill_size(request), gpu.prefill_s(request))
            case DecodeImage(request_id):
                request = self._requests[request_id]
                return Measurement(WorkKind.DECODE, decode_size(request), gpu.decode_s(request))
            case DropPrefix():
                raise AssertionError("the simulated GPU has memory without end")

    def _step(self, members: list[PreparedRequest]) -> Measurement:
        sizes = [step_size(request) for request in members]
        tokens = sum(size.tokens for size in sizes)
        context = sum(size.context for size in sizes) // len(sizes)
        return Measurement(WorkKind.STEP, Size(tokens, context), gpu.step_s(members))


@functools.cache
def _prompt(num_tokens: int, num_condition_images: int) -> TokenizedPrompt:
    """Condition images first, as the published chat template has them; a slot stands for 2 x 2 tokens."""
    grids = [_grid(CONDITION_SIDE_PX)] * num_condition_images
    slots = [True] * sum(grid.num_slots for grid in grids) + [False] * num_tokens
    return TokenizedPrompt((0,) * len(slots), 0, prefix_layout(slots, grids))


@functools.cache
def _condition_images(count: int) -> tuple[ConditionImage, ...]:
    no_pixels = np.zeros((0, 0, 4), np.uint8)
    return (ConditionImage(no_pixels, no_pixels[..., :3], _grid(CONDITION_SIDE_PX), b""),) * count


@functools.cache
def _grid(side_px: int) -> Grid:
    return Grid(side_px // PX_PER_TOKEN, side_px // PX_PER_TOKEN)


@functools.cache
def _sigmas(num_steps: int) -> tuple[float, ...]:
    return tuple(1 - step / num_steps for step in range(num_steps + 1))
