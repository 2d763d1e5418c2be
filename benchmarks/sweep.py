"""A live server at several multiples of what it can do: whether goodput holds, and whether refusals tell the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.client import Client
from benchmarks.driving import Asked, Report, closed_loop, open_loop, report_on
from benchmarks.outcomes import NO_WAITS, Waits, judge_waits
from benchmarks.traffic import Kind, Mix

CAPACITY_CLIENTS = 8
TURNS = 3  # of each load
PATIENCE = 10.0  # times alone: the scheduler's own bound on a stretch, past which a request leads before all others
SLACK_S = 0.1  # for an answer to reach its client on a busy machine
MIN_GOODPUT = 0.9
MIN_TRUE = 0.95


@dataclass(slots=True)
class Sweep:
    """What a server does at several multiples of what it can do at most."""

    capacity_per_s: float
    reports: dict[float, Report]
    problems: list[str] = field(default_factory=list)


async def sweep(
    client: Client,
    mix: Mix,
    loads: Sequence[float],
    isolated_s: dict[Kind, float],
    duration_s: float,
    max_requests: int,
    seed: int,
) -> Sweep:
    """Measure the capacity, then let requests arrive at each of `loads` times it for `duration_s`. The loads take
    turns: a machine that is slower for a while is so for all of them."""
    turn_s = duration_s / TURNS
    busy = await closed_loop(client, mix, CAPACITY_CLIENTS, turn_s, max_requests, seed, keep=0)
    found = Sweep(report_on(busy, isolated_s, 1.0).served_per_s, {})
    asked: dict[float, list[Asked]] = {load: [] for load in loads}
    again: dict[float, list[Asked]] = {load: [] for load in loads}
    for number in range(TURNS * len(loads)):
        load = loads[number % len(loads)]
        more: list[Asked] = []
        rate_per_s = load * found.capacity_per_s
        sent = await open_loop(client, mix, rate_per_s, turn_s, max_requests, seed + 1 + number, keep=0, again=more)
        move_s = end_of(asked[load] + again[load]) - min((entry.answer.sent_s for entry in sent), default=0.0)
        asked[load] += later(sent, move_s)
        again[load] += later(more, move_s)
    for load in loads:
        if not asked[load]:
            raise SystemExit(f"no request was sent at load {load}: lengthen --duration")
        report = found.reports[load] = report_on(asked[load], isolated_s, found.capacity_per_s, PATIENCE)
        report.waits = waits_of(asked[load], again[load])
        found.problems += [f"load {load}: {problem}" for problem in report.problems]
        if others := report.statuses.keys() - {200, 429}:
            found.problems.append(f"load {load}: refused with {sorted(others)}")
        if report.waits.true_share < MIN_TRUE:
            found.problems.append(f"load {load}: only {report.waits.true_share:.0%} of the waits were true")
    goodputs = [report.goodput_per_s for report in found.reports.values()]
    if (share := goodputs[-1] / max(goodputs)) < MIN_GOODPUT:
        found.problems.append(f"goodput at load {loads[-1]} is {share:.0%} of its peak")
    return found


def end_of(asked: Sequence[Asked]) -> float:
    return max((entry.answer.answered_s for entry in asked), default=0.0)


def later(asked: Sequence[Asked], move_s: float) -> list[Asked]:
    """The same at other times, so that the turns of a load stand one behind the other."""
    return [
        replace(
            entry,
            answer=replace(
                entry.answer, sent_s=entry.answer.sent_s + move_s, answered_s=entry.answer.answered_s + move_s
            ),
        )
        for entry in asked
    ]


def waits_of(asked: Sequence[Asked], again: Sequence[Asked]) -> Waits:
    refusals = [
        (entry.answer.answered_s, entry.answer.retry_after_s)
        for entry in asked
        if entry.answer.status == 429 and entry.answer.retry_after_s is not None
    ]
    ended_s = [entry.answer.answered_s for entry in (*asked, *again) if entry.answer.status == 200]
    admitted = sum(entry.answer.status == 200 for entry in again)
    return replace(judge_waits(refusals, ended_s, SLACK_S), asked_again=len(again), admitted=admitted)


def show_sweep(found: Sweep) -> None:
    print(
        f"capacity with {CAPACITY_CLIENTS} clients: {found.capacity_per_s:.2f}/s; good: within {PATIENCE:g} x alone\n"
    )
    print(
        f"{'load':>5} {'sent':>6} {'200':>6} {'429':>6} {'served/s':>9} {'good/s':>7} {'p50 s':>6} {'p95 s':>6}", end=""
    )
    print(f" {'waits true':>11} {'told s':>7} {'was s':>6} {'again':>9}")
    for load, report in found.reports.items():
        waits, summary = report.waits or NO_WAITS, report.summary
        print(
            f"{load:5.2f} {summary.count:6d} {report.statuses.get(200, 0):6d} {report.statuses.get(429, 0):6d} "
            f"{report.served_per_s:9.2f} {report.goodput_per_s:7.2f} {summary.p50_s:6.2f} {summary.p95_s:6.2f} "
            f"{waits.true_share:11.1%} {waits.told_p50_s:7.2f} {waits.was_p50_s:6.2f} "
            f"{waits.admitted:4d}/{waits.asked_again:<4d}"
        )
    for problem in found.problems:
        print(f"FAIL  {problem}")
