"""The simulation's traffic against a live server, over HTTP.

    python -m benchmarks.load --load 0.7 --duration 60 --sizes 64:60,128:35,192:5 --steps 8
    python -m benchmarks.load --clients 64 --duration 60 --sizes 64 --verify 20
    python -m benchmarks.load --loads 0.5,0.8,1.2,2 --duration 30 --sizes 64 --steps 4

First every kind of request runs alone: that is its isolated time, and over the mix the capacity that `--load` and the
printed throughput are relative to. Then requests arrive by a Poisson process (`--load`, `--rate`), or from `--clients`
that each send the next when the last is answered, heeding `Retry-After`. `--verify` asks for some of the pictures
again, alone, and compares. The exit status is 1 if an answer is missing, mixed up, or neither 200, 429 nor 503, or if a
429 lacks `Retry-After`.

`--loads` measures what the server can do with several clients at once, and then lets requests arrive at each of these
multiples of it. Some of those who are refused ask again after the wait that they were told. The exit status is also 1
if goodput at the last load is under 90 % of its peak, if a request is refused with anything but 429, or if fewer than
95 % of the waits were true (`benchmarks.outcomes.Waits`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np

from benchmarks.client import Client
from benchmarks.driving import Report, calibrate, closed_loop, open_loop, plain, report_on, verify
from benchmarks.outcomes import HEADER, row
from benchmarks.pictures import as_json
from benchmarks.sweep import Sweep, show_sweep, sweep
from benchmarks.traffic import Mix

MAX_DURATION_S = 900.0
ANSWER_TIMEOUT_S = 600.0
MIN_PSNR_DB = 40.0  # between a picture from a batch and the same alone; another picture has some 10


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


async def run(options: argparse.Namespace) -> Report | Sweep:
    mix = Mix("live", options.sizes, options.edits, options.guided)
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=ANSWER_TIMEOUT_S, limits=unbounded
    ) as http:
        client = Client(http, options.steps)
        isolated_s = await calibrate(client, mix)
        if options.loads:
            bounds = (options.duration, options.max_requests, options.seed)
            return await sweep(client, mix, options.loads, isolated_s, *bounds)
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


def parse_loads(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Open-loop or many-client load on a live server, with verdicts.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--loads", type=parse_loads, help="multiples of the measured capacity, one after the other")
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
    if isinstance(report, Sweep):
        show_sweep(report)
    else:
        show(report)
    if options.json:
        options.json.write_text(as_json(asdict(report)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
