"""What the engine adds to the work itself: the real engine and a real worker process around work that only waits.

    python -m benchmarks.overhead [--seconds 4] [--json FILE]

A request's overhead is its time from `generate` to the result, one request after the other, whose work takes no time.
A step's is the time in which the worker has requests and runs nothing for them, over the number of steps, with 1 and
with 64 requests alive: how long a device would idle between two steps. Its steps last 2 ms, without using the CPU. Of
it, `scheduling` is what `next_work` and `complete` take, measured by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.simulation import PX_PER_TOKEN, make_request
from benchmarks.traffic import Kind
from engine.config import EngineConfig
from engine.cost_model import CostModel
from engine.engine import Engine, Observation
from engine.memory import UNLIMITED
from engine.messages import WorkDone
from engine.profile import Profile
from engine.request import GenerationParams, PreparedRequest
from engine.runner import Runner
from engine.scheduler import Limits, Scheduler
from engine.work import DecodeImage, DenoiseStep, Work
from models.folder import embedded_checkpoint

MAX_REQUEST_MS = 3.0
MAX_STEP_MS = 0.2
LIVE = (1, 64)
SIDE_PX = 64
MAX_BATCH_ROWS = 8
TOKEN_BUDGET = 128  # eight pictures of 64 x 64, so that steps are shared
SHORT = GenerationParams("a red circle on a white background", seed=1, size_px=(SIDE_PX, SIDE_PX), num_steps=1)
LONG = replace(SHORT, num_steps=200)
SCHEDULER_ITEMS = 4000
STEP_S = 0.002  # of the long requests; the shortest real step on a large GPU takes 7 ms


class IdleRunner:
    """Takes the place of `engine.runner.Runner`: steps of requests that have many are slept through, everything else
    is done at once."""

    shortcut = ""
    runs_ahead = False

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget
        self._pictures: dict[str, np.ndarray] = {}
        self._long: set[str] = set()

    def profile(self, max_rows: int) -> Profile:
        return Profile(CostModel(), UNLIMITED, self._token_budget)

    def add(self, request: PreparedRequest) -> None:
        grid = request.target_grid
        shape = (grid.height * PX_PER_TOKEN, grid.width * PX_PER_TOKEN, 4)
        self._pictures[request.request_id] = np.zeros(shape, np.uint8)
        if request.num_steps > 1:
            self._long.add(request.request_id)

    def remove(self, request_id: str) -> None:
        self._pictures.pop(request_id, None)
        self._long.discard(request_id)

    def run(self, work: Work) -> np.ndarray | None:
        if isinstance(work, DenoiseStep) and work.samples[0].request_id in self._long:
            time.sleep(STEP_S)
        return self._pictures[work.request_id] if isinstance(work, DecodeImage) else None

    def device_memory(self) -> None:
        return None

    def free_caches(self) -> None:
        pass


def load_idle_runner() -> Runner:
    return cast(Runner, IdleRunner(TOKEN_BUDGET))


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds; `step_ms` and `scheduler_ms` by the number of live requests."""

    request_ms_p50: float
    request_ms_p95: float
    step_ms: dict[int, float]
    scheduler_ms: dict[int, float]

    @property
    def passed(self) -> bool:
        return self.request_ms_p50 <= MAX_REQUEST_MS and all(ms <= MAX_STEP_MS for ms in self.step_ms.values())


class Probe:
    """An engine whose steps are counted and whose work is timed, by the worker."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.worked_s = 0.0
        config = EngineConfig(
            model=str(embedded_checkpoint()), device="cpu", max_queue=2 * max(LIVE), max_batch_rows=MAX_BATCH_ROWS
        )
        self.engine = Engine(config, load=load_idle_runner)
        self.engine.on_observation(self._observe)

    def _observe(self, observation: Observation) -> None:
        if isinstance(observation, WorkDone):
            self.worked_s += observation.seconds
            self.num_steps += isinstance(observation.work, DenoiseStep)

    async def request_ms(self, seconds: float) -> list[float]:
        """Latencies of single-step requests, one after the other."""
        found = []
        ends_s = time.perf_counter() + seconds
        while (started_s := time.perf_counter()) < ends_s:
            await self.engine.generate(SHORT, request_id="short")
            found.append(1000 * (time.perf_counter() - started_s))
        return found[len(found) // 10 :]  # the first ones warm things up

    async def step_ms(self, live: int, seconds: float) -> float:
        """Time without work a step while `live` requests are alive; each that ends is followed by another."""

        async def keep_going() -> None:
            while True:
                await self.engine.generate(LONG, request_id="long")

        tasks = [asyncio.create_task(keep_going()) for _ in range(live)]
        await asyncio.sleep(seconds / 4)
        steps, worked_s, started_s = self.num_steps, self.worked_s, time.perf_counter()
        await asyncio.sleep(seconds)
        idle_s = time.perf_counter() - started_s - (self.worked_s - worked_s)
        ms = 1000 * idle_s / (self.num_steps - steps)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ms


async def measure(seconds: float) -> Figures:
    probe = Probe()
    await probe.engine.start()
    try:
        request_ms = await probe.request_ms(seconds)
        step_ms = {live: await probe.step_ms(live, seconds) for live in LIVE}
    finally:
        await probe.engine.stop(drain_s=1)
    return Figures(
        request_ms_p50=statistics.median(request_ms),
        request_ms_p95=statistics.quantiles(request_ms, n=20)[-1],
        step_ms=step_ms,
        scheduler_ms={live: scheduler_ms(live) for live in LIVE},
    )


def scheduler_ms(live: int) -> float:
    """What `next_work` and `complete` take an item while `live` requests of two sizes are in."""
    scheduler = Scheduler(Limits(max_batch_rows=MAX_BATCH_ROWS, token_budget=TOKEN_BUDGET), CostModel())
    numbers = itertools.count()

    def add() -> None:
        number = next(numbers)
        scheduler.add(make_request(str(number), Kind((64, 128)[number % 2]), arrived_s=0.0))

    for _ in range(live):
        add()
    spent_s = 0.0
    for _ in range(SCHEDULER_ITEMS):
        started_s = time.perf_counter()
        work = scheduler.next_work(0.0)
        assert work is not None
        finished = scheduler.complete(work)
        spent_s += time.perf_counter() - started_s
        for _ in finished:
            add()
    return 1000 * spent_s / SCHEDULER_ITEMS


def show(figures: Figures) -> None:
    def verdict(ms: float, limit_ms: float) -> str:
        return f"{'pass' if ms <= limit_ms else 'FAIL'}  (at most {limit_ms} ms)"

    print(f"a request       {figures.request_ms_p50:8.3f} ms  {verdict(figures.request_ms_p50, MAX_REQUEST_MS)}")
    print(f"  95th percentile {figures.request_ms_p95:6.3f} ms")
    for live in LIVE:
        print(f"a step, {live:2d} live {figures.step_ms[live]:8.3f} ms  {verdict(figures.step_ms[live], MAX_STEP_MS)}")
        print(f"  its scheduling  {figures.scheduler_ms[live]:6.3f} ms")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the engine adds to work that takes no time.")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the three measurements")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    figures = asyncio.run(measure(options.seconds))
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    return 0 if figures.passed else 1


if __name__ == "__main__":
    sys.exit(main())
