"""Sends the traffic of a `Mix` to a live server, and reports what came of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.client import Answer, Client
from benchmarks.outcomes import PATIENCE, Outcome, Summary, Waits, summarize
from benchmarks.pictures import psnr_db
from benchmarks.traffic import PROMPT_TOKENS, Kind, Mix, poisson_arrivals

EXPECTED = {200, 429, 503}
CALIBRATION_ROUNDS = 2  # after one to warm up
ASKED_AGAIN = 5  # one in so many: more of them would be a higher load


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was sent, and its answer."""

    kind: Kind
    seed: int
    answer: Answer


@dataclass(slots=True)
class Report:
    """What a run found; `problems` make it fail."""

    capacity_per_s: float
    summary: Summary
    served_per_s: float
    speedup: float  # over one request at a time
    goodput_per_s: float  # as in `summary`, but over the whole time until the last answer
    statuses: dict[int, int]
    verified: int = 0
    worst_psnr_db: float | None = None
    waits: Waits | None = None
    problems: list[str] = field(default_factory=list)


async def calibrate(client: Client, mix: Mix) -> dict[Kind, float]:
    """Seconds that each kind takes alone."""
    isolated_s: dict[Kind, float] = {}
    for kind in mix.kinds():
        times = []
        for seed in range(1 + CALIBRATION_ROUNDS):
            answer = await client.ask(kind, seed)
            if answer.status != 200:
                raise SystemExit(f"the server answers {answer.status} to {kind}: {answer.error}")
            times.append(answer.latency_s)
        isolated_s[kind] = min(times[1:])
    return isolated_s


async def open_loop(
    client: Client,
    mix: Mix,
    rate_per_s: float,
    duration_s: float,
    max_requests: int,
    seed: int,
    keep: int,
    again: list[Asked] | None = None,
) -> list[Asked]:
    """Send at Poisson times, whatever has been answered; `keep` pictures are kept. Of those that are refused every
    `ASKED_AGAIN`th is sent once more after the wait that it was told, and its second answer goes to `again`."""
    arrivals = poisson_arrivals(mix, rate_per_s, max_requests, seed)
    arrivals = [arrival for arrival in arrivals if arrival.at_s < duration_s]
    started_s = time.monotonic()
    every = max(1, len(arrivals) // max(1, keep))

    async def one(index: int) -> Asked:
        arrival, own_seed = arrivals[index], seed * 1_000_000 + index
        await asyncio.sleep(started_s + arrival.at_s - time.monotonic())
        answer = await client.ask(arrival.kind, own_seed, keep_pixels=bool(keep) and index % every == 0)
        if again is not None and answer.retry_after_s is not None and index % ASKED_AGAIN == 0:
            await asyncio.sleep(answer.retry_after_s)
            again.append(Asked(arrival.kind, own_seed, await client.ask(arrival.kind, own_seed)))
        return Asked(arrival.kind, own_seed, answer)

    return list(await asyncio.gather(*map(one, range(len(arrivals)))))


async def closed_loop(
    client: Client, mix: Mix, num_clients: int, duration_s: float, max_requests: int, seed: int, keep: int
) -> list[Asked]:
    """Each client sends its next request when the last is answered, or when it was told to try again."""
    kinds = [arrival.kind for arrival in poisson_arrivals(mix, 1.0, max_requests, seed)]
    asked: list[Asked] = []
    ends_s = time.monotonic() + duration_s
    numbers = iter(range(max_requests))

    async def one() -> None:
        while time.monotonic() < ends_s and (index := next(numbers, None)) is not None:
            own_seed = seed * 1_000_000 + index
            kept = sum(entry.answer.pixels is not None for entry in asked)
            answer = await client.ask(kinds[index], own_seed, keep_pixels=kept < keep)
            asked.append(Asked(kinds[index], own_seed, answer))
            if answer.status != 200:
                await asyncio.sleep(max(0.0, min(answer.retry_after_s or 0.1, ends_s - time.monotonic())))

    await asyncio.gather(*(one() for _ in range(num_clients)))
    return asked


async def verify(client: Client, asked: Sequence[Asked], count: int) -> list[float]:
    """PSNR of pictures that came under load against the same requests alone."""
    found = []
    for entry in [entry for entry in asked if entry.answer.pixels is not None][:count]:
        alone = await client.ask(entry.kind, entry.seed, keep_pixels=True)
        if alone.pixels is None or entry.answer.pixels is None:
            raise SystemExit(f"the server answers {alone.status} to a request alone: {alone.error}")
        found.append(psnr_db(entry.answer.pixels, alone.pixels))
    return found


def report_on(
    asked: Sequence[Asked], isolated_s: dict[Kind, float], capacity_per_s: float, patience: float = PATIENCE
) -> Report:
    answers = [entry.answer for entry in asked]
    outcomes = [
        Outcome(entry.answer.sent_s, entry.answer.answered_s, isolated_s[plain(entry.kind)], entry.answer.status)
        for entry in asked
    ]
    sent_s = [answer.sent_s for answer in answers]
    arriving_s = max(sent_s) - min(sent_s) or 1.0
    whole_s = max(answer.answered_s for answer in answers) - min(sent_s)
    statuses = Counter(answer.status for answer in answers)
    served_per_s = statuses[200] / whole_s
    summary = summarize(outcomes, arriving_s, patience)
    report = Report(
        capacity_per_s=capacity_per_s,
        summary=summary,
        goodput_per_s=summary.share_within * summary.count / whole_s,
        served_per_s=served_per_s,
        speedup=served_per_s / capacity_per_s,
        statuses=dict(sorted(statuses.items())),
    )
    for status in sorted(statuses.keys() - EXPECTED):
        example = next(answer.error for answer in answers if answer.status == status)
        report.problems.append(f"{statuses[status]} requests ended with {status or 'no answer'}: {example}")
    if silent := sum(answer.status == 429 and answer.retry_after_s is None for answer in answers):
        report.problems.append(f"{silent} of {statuses[429]} answers 429 lack Retry-After")
    if crossed := sum(entry.answer.status == 200 and entry.answer.seed != entry.seed for entry in asked):
        report.problems.append(f"{crossed} pictures are another request's")
    return report


def plain(kind: Kind) -> Kind:
    """The kind whose isolated time stands for this one: the prompt's length matters little."""
    return replace(kind, prompt_tokens=PROMPT_TOKENS[0])
