"""What clients saw, in figures: latencies, and how they compare with having the machine to oneself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PATIENCE = 3.0  # times its isolated time is how long a request may take and still count as served well


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended, by its HTTP status; `isolated_s` is what it takes with the machine to itself."""

    arrived_s: float
    finished_s: float
    isolated_s: float
    status: int = 200

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrived_s

    @property
    def stretch(self) -> float:
        return self.latency_s / self.isolated_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over many outcomes: latencies of those that were served, the share of all that were served within
    `PATIENCE`, and `goodput_per_s`, the number of these over the time in which all came."""

    count: int
    refused: int
    mean_s: float
    p50_s: float
    p95_s: float
    share_within: float
    goodput_per_s: float
    max_stretch: float


def summarize(outcomes: Sequence[Outcome], duration_s: float, patience: float = PATIENCE) -> Summary:
    """`duration_s` is the time in which the requests arrived; `patience` takes the place of `PATIENCE`."""
    served = [outcome for outcome in outcomes if outcome.status == 200]
    latencies = np.array([outcome.latency_s for outcome in served] or [0.0])
    stretches = np.array([outcome.stretch for outcome in served] or [0.0])
    within = sum(outcome.stretch <= patience for outcome in served)
    p50_s, p95_s = np.percentile(latencies, (50, 95)).tolist()
    return Summary(
        count=len(outcomes),
        refused=len(outcomes) - len(served),
        mean_s=float(latencies.mean()),
        p50_s=p50_s,
        p95_s=p95_s,
        share_within=within / max(1, len(outcomes)),
        goodput_per_s=within / duration_s,
        max_stretch=float(stretches.max()),
    )


@dataclass(frozen=True, slots=True)
class Waits:
    """What refused clients were told against what was: `true_share` of them were told to wait for at least as long as
    it took until a request ended and left a place; of `asked_again`, who waited, `admitted` found one, though newcomers
    take places as well."""

    count: int
    true_share: float
    told_p50_s: float
    was_p50_s: float
    asked_again: int = 0
    admitted: int = 0


NO_WAITS = Waits(0, 1.0, 0.0, 0.0)


def judge_waits(refusals: Sequence[tuple[float, float]], ended_s: Sequence[float], slack_s: float) -> Waits:
    """`refusals` are moments and the waits that were told then; requests left the queue at the moments `ended_s`."""
    ends = np.sort(np.array(ended_s))
    moments = np.array([at_s for at_s, _ in refusals])
    told = np.array([wait_s for _, wait_s in refusals])
    index = np.searchsorted(ends, moments, side="right")
    known = index < len(ends)
    was = ends[index[known]] - moments[known]
    told = told[known]
    if not len(was):
        return NO_WAITS
    return Waits(
        count=len(was),
        true_share=float(np.mean(told + slack_s >= was)),
        told_p50_s=float(np.median(told)),
        was_p50_s=float(np.median(was)),
    )


HEADER = f"{'mean s':>8} {'p50 s':>8} {'p95 s':>8} {'in 3x':>7} {'good/s':>7} {'stretch':>8} {'refused':>8}"


def row(summary: Summary) -> str:
    """A summary as a line under `HEADER`."""
    return (
        f"{summary.mean_s:8.2f} {summary.p50_s:8.2f} {summary.p95_s:8.2f} {summary.share_within:7.1%} "
        f"{summary.goodput_per_s:7.3f} {summary.max_stretch:8.1f} {summary.refused:8d}"
    )
