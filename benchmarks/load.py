"""The simulation's traffic against a live server, over HTTP.

    python -m benchmarks.load --load 0.7 --duration 60 --sizes 64:60,128:35,192:5 --steps 8
    python -m benchmarks.load --clients 64 --duration 60 --sizes 64 --verify 20

First every kind of request runs alone: that is its isolated time, and over the mix the capacity that `--load` and the
printed throughput are relative to. Then requests arrive by a Poisson process (`--load`, `--rate`), or from `--clients`
that each send the next when the last is answered, heeding `Retry-After`. `--verify` asks for some of the pictures
again, alone, and compares. The exit status is 1 if an answer is missing, mixed up, or neither 200, 429 nor 503, or if a
429 lacks `Retry-After`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np

from benchmarks.client import Answer, Client
from benchmarks.outcomes import HEADER, Outcome, Summary, row, summarize
from benchmarks.pictures import as_json, psnr_db
from benchmarks.traffic import PROMPT_TOKENS, Kind, Mix, poisson_arrivals

EXPECTED = {200, 429, 503}
MAX_DURATION_S = 900.0
ANSWER_TIMEOUT_S = 600.0
CALIBRATION_ROUNDS = 2  # after one to warm up
MIN_PSNR_DB = 40.0  # between a picture from a batch and the same alone; another picture has some 10


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
    statuses: dict[int, int]
    verified: int = 0
    worst_psnr_db: float | None = None
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
    client: Client, mix: Mix, rate_per_s: float, duration_s: float, max_requests: int, seed: int, keep: int
) -> list[Asked]:
    """Send at Poisson times, whatever has been answered; `keep` pictures are kept."""
    arrivals = poisson_arrivals(mix, rate_per_s, max_requests, seed)
    arrivals = [arrival for arrival in arrivals if arrival.at_s < duration_s]
    started_s = time.monotonic()
    every = max(1, len(arrivals) // max(1, keep))

    async def one(index: int) -> Asked:
        arrival, own_seed = arrivals[index], seed * 1_000_000 + index
        await asyncio.sleep(started_s + arrival.at_s - time.monotonic())
        answer = await client.ask(arrival.kind, own_seed, keep_pixels=bool(keep) and index % every == 0)
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


def report_on(asked: Sequence[Asked], isolated_s: dict[Kind, float], capacity_per_s: float) -> Report:
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
    report = Report(
        capacity_per_s=capacity_per_s,
        summary=summarize(outcomes, arriving_s),
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


def show(report: Report) -> None:
    print(HEADER)
    print(row(report.summary))
    print(
        f"\n{report.summary.count} requests, by status: {report.statuses}\n"
        f"{report.served_per_s:.2f} pictures/s; one at a time: {report.capacity_per_s:.2f}/s "
        f"({report.speedup:.2f} ×)"
    )
    if report.worst_psnr_db is not None:
        print(f"{report.verified} pictures drawn again alone: at least {report.worst_psnr_db:.1f} dB")
    for problem in report.problems:
        print(f"FAIL  {problem}")


async def run(options: argparse.Namespace) -> Report:
    mix = Mix("live", options.sizes, options.edits, options.guided)
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=ANSWER_TIMEOUT_S, limits=unbounded
    ) as http:
        client = Client(http, options.steps)
        isolated_s = await calibrate(client, mix)
        capacity_per_s = 1 / mix.mean_s(lambda kind: isolated_s[plain(kind)])
        bounds = (options.duration, options.max_requests, options.seed, options.verify)
        if options.clients:
            asked = await closed_loop(client, mix, options.clients, *bounds)
        else:
            asked = await open_loop(client, mix, options.rate or options.load * capacity_per_s, *bounds)
        if not asked:
            raise SystemExit("no request was sent: lengthen --duration or raise the rate")
        report = report_on(asked, isolated_s, capacity_per_s)
        if options.verify and (found := await verify(client, asked, options.verify)):
            report.verified, report.worst_psnr_db = len(found), float(np.min(found))
            if report.worst_psnr_db < MIN_PSNR_DB:
                report.problems.append(f"a picture is only {report.worst_psnr_db:.1f} dB from the same drawn alone")
    return report


def parse_sizes(text: str) -> tuple[tuple[int, float], ...]:
    """`64:60,128:40` are squares of 64 and 128 pixels at 60 to 40; a size without a weight has 1."""
    sizes = []
    for part in text.split(","):
        side_px, _, weight = part.partition(":")
        sizes.append((int(side_px), float(weight or 1)))
    return tuple(sizes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Open-loop or many-client load on a live server, with verdicts.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--load", type=float, help="arrivals relative to what the server does one at a time")
    amount.add_argument("--rate", type=float, help="arrivals a second")
    amount.add_argument("--clients", type=int, help="clients that each wait for their answer")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds in which requests are sent")
    parser.add_argument("--max-requests", type=int, default=10_000)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("64"), help="sides in pixels: 64:60,128:40")
    parser.add_argument("--edits", type=float, default=0.0, help="share with one condition image")
    parser.add_argument("--guided", type=float, default=0.0, help="share with classifier-free guidance")
    parser.add_argument("--steps", type=int, help="denoise steps; the server's default if absent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", type=int, default=0, metavar="N", help="draw N pictures again, alone, and compare")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not 0 < options.duration <= MAX_DURATION_S:
        parser.error(f"--duration is at most {MAX_DURATION_S:.0f} s")
    if not 0 <= options.seed < 4000:
        parser.error("--seed is from 0 to 3999")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    report = asyncio.run(run(options))
    show(report)
    if options.json:
        options.json.write_text(as_json(asdict(report)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
