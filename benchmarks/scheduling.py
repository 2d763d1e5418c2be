"""The engine's scheduler against two others, on a simulated GPU, at several loads.

    python -m benchmarks.scheduling [--json FILE] [--requests 500] [--seeds 0 1]

Prints latencies, the share served within three times their isolated time, goodput and the largest stretch, then what
the engine promises and whether it holds; the exit status is 1 if something does not. Load 1 is what the GPU could
serve one request at a time; beyond it the queue fills and requests are refused, as the service does. The clock is
virtual, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.outcomes import HEADER, Outcome, Summary, row, summarize
from benchmarks.simulation import MAX_QUEUE, Drain, RunToCompletion, isolated_s, make_scheduler, simulate
from benchmarks.starvation import StarvationWatch
from benchmarks.traffic import EDITS, SIZES, UNIFORM, Arrival, Mix, poisson_arrivals
from engine.scheduler import Limits

MIXES = (UNIFORM, SIZES, EDITS)
LOADS = (0.5, 0.7, 0.85, 1.2)
POLICIES = ("ours", "run to completion", "drain")
WARM_UP = 100  # requests at the start that find the GPU emptier than later ones do
MAX_STRETCH = Limits().max_stretch


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one mix and load. `starvation_holds` is None where a policy makes no promise."""

    mix: str
    load: float
    policy: str
    summary: Summary
    num_starved: int = 0
    worst_excess_s: float = 0.0  # over what the starvation bound implies; a quantum is allowed for
    starvation_holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A promise, what was measured for it, and whether it holds."""

    what: str
    measured: str
    passed: bool


def run_cell(mix: Mix, load: float, policy: str, num_requests: int, seeds: Sequence[int]) -> Cell:
    """All seeds pooled; every policy sees the same arrivals."""
    outcomes: list[Outcome] = []
    watches: list[StarvationWatch] = []
    duration_s = 0.0
    for seed in seeds:
        arrivals = poisson_arrivals(mix, load / mix.mean_s(isolated_s), WARM_UP + num_requests, seed)
        outcomes += _run(policy, arrivals, seed, watches)[WARM_UP:]
        duration_s += arrivals[-1].at_s - arrivals[WARM_UP - 1].at_s
    summary = summarize(outcomes, duration_s)
    if not watches:
        return Cell(mix.name, load, policy, summary)
    return Cell(
        *(mix.name, load, policy, summary),
        num_starved=sum(watch.num_starved for watch in watches),
        worst_excess_s=max(watch.worst_excess_s for watch in watches),
        starvation_holds=all(watch.holds for watch in watches),
    )


def _run(policy: str, arrivals: Sequence[Arrival], seed: int, watches: list[StarvationWatch]) -> list[Outcome]:
    match policy:
        case "ours":
            scheduler, costs = make_scheduler(seed, max_stretch=MAX_STRETCH)
            watches.append(StarvationWatch(costs, MAX_STRETCH))
            return simulate(scheduler, arrivals, costs=costs, watch=watches[-1])
        case "drain":
            return simulate(Drain(), arrivals)
        case _:
            return simulate(RunToCompletion(), arrivals)


def check(cells: Sequence[Cell]) -> list[Check]:
    """The promises that the cells at hand have something to say about."""
    found = {(cell.mix, cell.load, cell.policy): cell for cell in cells}
    checks: list[Check] = []

    def ratio(mix: str, load: float, other: str, figure: Callable[[Summary], float], limit: float, what: str) -> None:
        ours, theirs = found.get((mix, load, "ours")), found.get((mix, load, other))
        if ours and theirs and figure(theirs.summary):
            value = figure(ours.summary) / figure(theirs.summary)
            checks.append(
                Check(f"{mix} at {load}: {what} ≤ {limit} × {other}'s", f"{value:.3f}", round(value, 3) <= limit)
            )

    def share(mix: str, load: float, limit: float) -> None:
        if ours := found.get((mix, load, "ours")):
            value = ours.summary.share_within
            checks.append(Check(f"{mix} at {load}: within 3 × isolated ≥ {limit:.0%}", f"{value:.1%}", value >= limit))

    for mix in (SIZES.name, EDITS.name):
        ratio(mix, 0.7, "drain", lambda summary: summary.mean_s, 0.65, "mean latency")
        share(mix, 0.7, 0.92)
        ratio(mix, 0.85, "drain", lambda summary: summary.mean_s, 0.7, "mean latency")
        share(mix, 0.85, 0.78)
    for load in LOADS:
        ratio(UNIFORM.name, load, "run to completion", lambda summary: summary.mean_s, 1.0, "mean latency")
    if bounded := [cell for cell in cells if cell.starvation_holds is not None]:
        worst_s = max(cell.worst_excess_s for cell in bounded)
        holds = all(cell.starvation_holds for cell in bounded)
        starved = sum(cell.num_starved for cell in bounded)
        checks.append(
            Check(
                "nobody waits beyond the starvation bound, a quantum aside",
                f"{starved} reached it, the worst overstayed by {worst_s:.2f} s",
                holds,
            )
        )
    return checks


def print_cells(cells: Iterable[Cell]) -> list[Cell]:
    """A table that grows as the cells come in."""
    print(f"{'mix':8} {'load':>4} {'policy':18} {HEADER}")
    done = []
    for cell in cells:
        print(f"{cell.mix:8} {cell.load:4} {cell.policy:18} {row(cell.summary)}", flush=True)
        done.append(cell)
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The engine's scheduler against two others, on a simulated GPU.")
    parser.add_argument("--requests", type=int, default=500, help=f"per cell and seed, after {WARM_UP} to warm up")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    started_s = time.process_time()
    cells = print_cells(
        run_cell(mix, load, policy, options.requests, options.seeds)
        for mix in MIXES
        for load in options.loads
        for policy in POLICIES
    )
    checks = check(cells)
    print()
    for item in checks:
        print(f"{'pass' if item.passed else 'FAIL'}  {item.what}: {item.measured}")
    print(
        f"\nseeds {options.seeds}, {options.requests} requests a cell and seed, queue of {MAX_QUEUE}; simulated in "
        f"{time.process_time() - started_s:.0f} s"
    )
    if options.json:
        report = {
            "seeds": options.seeds,
            "requests": options.requests,
            "cells": [asdict(cell) for cell in cells],
            "checks": [asdict(item) for item in checks],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(item.passed for item in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
