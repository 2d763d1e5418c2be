"""A service under everything that clients do, for hours: nothing lost, nothing mixed up, nothing kept.

    make soak                                   two hours, on the embedded checkpoint
    make soak ARGS="--minutes 3 --json FILE"    shorter

It starts a server of its own and sends visitors (`benchmarks.visits`), in phases. In the first half the worker is
killed in the middle of each phase. After each phase everybody leaves, and what is held is noted. The exit status is 1
if a visit met what a service must not do, if 503 came while there was a worker, if the service counted other pictures
than its clients, if it holds more at the end than `MAX_GROWTH` allows over the first phase with a kill (the worker:
over the first one after the last kill), or if it does not end well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np

from benchmarks.footprint import Footprint
from benchmarks.pictures import as_json
from benchmarks.visits import Unexpected, Visitors
from tests.e2e.endurance import at_rest, client_of, counters, until_ready
from tests.server import Server, assert_gone, serving

NUM_VISITORS = 8
MAX_PAUSE_S = 0.3  # of a visitor between two visits
MAX_PROBLEMS = 20  # that are told
MAX_GROWTH = {"rss_growth_mib": 32.0, "descriptors_growth": 0, "threads_growth": 8}  # pools grow when needed
MAX_TASKS_GROWTH = 0
# Small stores, so that they are full soon and do not look like a leak.
FLAGS = (
    "--max-queue", "16", "--request-seconds", "3", "--link-store-bytes", "1000000", "--job-store-bytes", "1000000",
    "--max-jobs", "10",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rest:
    """What is held between two phases, with nobody there."""

    at_s: float
    service: Footprint
    worker: Footprint
    tasks: int
    worker_pid: int


@dataclass(slots=True)
class Report:
    """What a soak found; `problems` make it fail."""

    statuses: dict[str, dict[int, int]] = field(default_factory=dict)  # by kind of visit; 0 is a client that left
    p95_s: dict[str, float] = field(default_factory=dict)
    rests: list[Rest] = field(default_factory=list)
    kills: int = 0
    longest_restart_s: float = 0.0
    delivered: int = 0
    worst_psnr_db: float = float("inf")
    problems: list[str] = field(default_factory=list)


class Soak:
    """One server and its visitors."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.report = Report()
        self.dice = random.Random(seed)
        self.visitors = Visitors(self.dice)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.statuses: dict[str, Counter[int]] = defaultdict(Counter)
        self.without_worker: list[tuple[float, float]] = []  # from, until
        self.started_s = time.monotonic()

    async def run(self, duration_s: float, num_phases: int) -> Report:
        async with client_of(self.server) as http:
            await self.visitors.learn(http)
            before = await counters(http)
        for number in range(num_phases):
            await self.phase(duration_s / num_phases, kills=0 < number < num_phases // 2)
            self.report.rests.append(await self.rest())
        async with client_of(self.server) as http:
            await self.compare_counts(http, before)
        self.judge_growth()
        report, visitors = self.report, self.visitors
        report.statuses = {name: dict(sorted(found.items())) for name, found in sorted(self.statuses.items())}
        report.p95_s = {name: round(float(np.percentile(times, 95)), 3) for name, times in self.seconds.items()}
        report.delivered, report.worst_psnr_db = visitors.delivered, visitors.worst_psnr_db
        return report

    async def phase(self, duration_s: float, *, kills: bool) -> None:
        ends_s = time.monotonic() + duration_s
        async with client_of(self.server) as http:
            tasks = [asyncio.create_task(self.keep_visiting(http, ends_s)) for _ in range(NUM_VISITORS)]
            if kills:
                await asyncio.sleep(duration_s / 2)
                await self.kill_worker(http)
            await asyncio.gather(*tasks)
            await until_ready(http)

    async def keep_visiting(self, http: httpx.AsyncClient, ends_s: float) -> None:
        kinds = self.visitors.kinds()
        while time.monotonic() < ends_s:
            [visit] = self.dice.choices(list(kinds), list(kinds.values()))
            name, sent_s = visit.__name__, time.monotonic()
            try:
                status = await visit(http)
            except (Unexpected, httpx.HTTPError, TimeoutError, ValueError, LookupError, OSError) as error:
                self.report.problems.append(f"{name}: {error!r}")
                continue
            now_s = time.monotonic()
            self.statuses[name][status] += 1
            self.seconds[name].append(now_s - sent_s)
            if status == 503 and not any(down_s < now_s and sent_s < up_s for down_s, up_s in self.without_worker):
                self.report.problems.append(f"{name}: 503 while there was a worker")
            await asyncio.sleep(self.dice.uniform(0, MAX_PAUSE_S))

    async def kill_worker(self, http: httpx.AsyncClient) -> None:
        workers, killed_s = self.server.workers(), time.monotonic()
        self.without_worker.append((killed_s, float("inf")))
        os.kill(workers[0], signal.SIGKILL)
        await asyncio.to_thread(assert_gone, workers)
        await until_ready(http, status=503)
        await until_ready(http)
        self.without_worker[-1] = (killed_s, time.monotonic())
        self.report.kills += 1
        self.report.longest_restart_s = max(self.report.longest_restart_s, round(time.monotonic() - killed_s, 1))

    async def rest(self) -> Rest:
        """Wait until whoever left is noticed, and look."""
        await at_rest(self.server)
        async with client_of(self.server) as http:
            state = (await http.get("/health")).json()
            if state != {"status": "ready", "running": 0, "waiting": 0}:
                self.report.problems.append(f"with nobody there, its health is {state}")
            page = (await http.get("/metrics")).text
        [tasks] = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith("easel_tasks ")]
        [worker] = self.server.workers()
        await at_rest(self.server)
        return Rest(
            at_s=round(time.monotonic() - self.started_s, 1),
            service=Footprint.of(self.server.process.pid),
            worker=Footprint.of(worker),
            tasks=int(float(tasks)),
            worker_pid=worker,
        )

    async def compare_counts(self, http: httpx.AsyncClient, before: dict[tuple[str, ...], float]) -> None:
        """The service's counts against the clients': every picture that one had was drawn, and no other."""
        now = await counters(http)
        grown = Counter({key[0]: 0.0 for key in now})
        for key, value in now.items():
            if key[0] != "easel_requests_total" or key[-1] == "ok":
                grown[key[0]] += value - before.get(key, 0)
        least, most = self.visitors.delivered, self.visitors.delivered + self.visitors.unseen
        for name in ("easel_requests_total", "easel_images_total"):
            if not least <= grown[name] <= most:
                self.report.problems.append(f"{name} grew by {grown[name]:.0f}; clients had {least} to {most}")
        if (restarts := grown["easel_worker_restarts_total"]) != self.report.kills:
            self.report.problems.append(f"{restarts:.0f} restarts of the worker after {self.report.kills} kills")

    def judge_growth(self) -> None:
        rests = self.report.rests
        same_worker = [rest for rest in rests if rest.worker_pid == rests[-1].worker_pid]
        for name, before, after in (
            ("service", rests[1].service, rests[-1].service),
            ("worker", same_worker[0].worker, same_worker[-1].worker),
        ):
            for what, growth in after.since(before).items():
                if growth > MAX_GROWTH[what]:
                    self.report.problems.append(f"{name}: {what} is {growth}, more than {MAX_GROWTH[what]}")
        if (tasks := rests[-1].tasks - rests[1].tasks) > MAX_TASKS_GROWTH:
            self.report.problems.append(f"service: {tasks} tasks more than after the first kill")


def soak(model: Path | None, duration_s: float, num_phases: int, seed: int) -> Report:
    """Start a server, let visitors at it, and stop it; `model` None means the embedded checkpoint."""
    with TemporaryDirectory() as folder, serving(model, Path(folder), *FLAGS) as server:
        report = asyncio.run(Soak(server, seed).run(duration_s, num_phases))
        children = server.children()
        if status := server.stop():
            report.problems.append(f"the service ended with {status} after SIGTERM")
        assert_gone(children)
        if "Traceback" in server.log:
            report.problems.append("there is a traceback in the log: " + server.log.partition("Traceback")[2][-500:])
    return report


def show(report: Report) -> None:
    print(f"{'visit':<16} {'count':>7} {'p95 s':>7}  by status")
    for name, statuses in report.statuses.items():
        print(f"{name:<16} {sum(statuses.values()):7d} {report.p95_s[name]:7.2f}  {statuses}")
    print(f"\n{'at s':>8} {'service MiB':>12} {'fds':>5} {'threads':>8} {'tasks':>6} {'worker MiB':>11} {'fds':>5}")
    for rest in report.rests:
        service, worker = rest.service, rest.worker
        print(
            f"{rest.at_s:8.0f} {service.rss_mib:12.1f} {service.descriptors:5d} {service.threads:8d} {rest.tasks:6d} "
            f"{worker.rss_mib:11.1f} {worker.descriptors:5d}"
        )
    print(
        f"\n{report.delivered} pictures, the worst {report.worst_psnr_db:.1f} dB from its own alone; "
        f"{report.kills} workers killed, ready again within {report.longest_restart_s} s"
    )
    for problem in report.problems[:MAX_PROBLEMS]:
        print(f"FAIL  {problem}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic on a server of its own, and a verdict.")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--phases", type=int, default=12, help="between which what is held is noted; 3 or more")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; the embedded one if absent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.phases < 3:
        parser.error("--phases is at least 3")
    report = soak(options.model, options.minutes * 60, options.phases, options.seed)
    show(report)
    if options.json:
        options.json.write_text(as_json(asdict(report)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
