"""What 500 slow connections cost everybody else: the latency of small requests without and with them.

    python -m benchmarks.slow_connections [--connections 500] [--seconds 20] [--json FILE]

A third of the connections says nothing, a third half a head, a third sends its body a byte a second. One that the
service ends is opened again, so their number holds. They live in a process of their own; the requests go one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx
import numpy as np

from tests.server import Server, serving

HEAD = b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BEGINNINGS = (b"", HEAD, HEAD + b"content-length: 1000000\r\n\r\n")  # only behind the last one does more follow
ORDER = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 1, "seed": 1}
MAX_RATIO = 2.0
MAX_HELD_S = 15.0
ROUNDS = 2
OPENING_S = 10.0  # over which they come, so that they do not end all at once either


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one kind of request, in seconds."""

    request: str
    count: int
    alone_p50_s: float
    alone_p99_s: float
    beside_p50_s: float
    beside_p99_s: float

    @property
    def ratio(self) -> float:
        return self.beside_p99_s / self.alone_p99_s


@dataclass(frozen=True, slots=True)
class Ended:
    """How slow connections ended: their statuses (0: without one), and how long the longest one was held."""

    statuses: dict[int, int]
    max_held_s: float


async def hold_one(host: str, port: int, beginning: bytes, starts_s: float, ends_s: float) -> list[tuple[int, float]]:
    """Keep one slow connection until the time is over; the status and the seconds of each one that was ended."""
    found = []
    await asyncio.sleep(starts_s - time.monotonic())
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(beginning)
        reading = asyncio.ensure_future(reader.read(4096))
        while not reading.done() and time.monotonic() < ends_s:
            await asyncio.wait({reading}, timeout=1.0)
            if beginning.endswith(b"\r\n\r\n") and not reading.done():
                writer.write(b" ")
        if reading.done():
            answer = reading.result()
            found.append((int(answer.split()[1]) if answer else 0, time.monotonic() - began_s))
        reading.cancel()
        writer.close()
    return found


def hold(url: str, count: int, seconds: float) -> list[tuple[int, float]]:
    """Keep `count` slow connections; how each one that was ended did."""

    async def hold_all() -> list[list[tuple[int, float]]]:
        now_s, host, port = time.monotonic(), urlsplit(url).hostname or "", urlsplit(url).port or 80
        return await asyncio.gather(
            *(
                hold_one(
                    host,
                    port,
                    BEGINNINGS[index % len(BEGINNINGS)],
                    now_s + OPENING_S * index / count,
                    now_s + seconds,
                )
                for index in range(count)
            )
        )

    return [end for ends in asyncio.run(hold_all()) for end in ends]


def latencies_s(send: Callable[[], httpx.Response], seconds: float) -> list[float]:
    """Of the requests that fit into the time, one at a time."""
    found, ends_s = [], time.monotonic() + seconds
    while (began_s := time.monotonic()) < ends_s:
        send().raise_for_status()
        found.append(time.monotonic() - began_s)
    return found


def measure(server: Server, num_connections: int, seconds: float) -> tuple[list[Latency], Ended]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        requests: dict[str, Callable[[], httpx.Response]] = {
            "GET /v1/models": lambda: client.get("/v1/models"),
            "generation, 64², 1 step": lambda: client.post("/v1/images/generations", json=ORDER),
        }
        for send in requests.values():  # to warm up
            latencies_s(send, 2)
        alone: dict[str, list[float]] = {name: [] for name in requests}
        crowded: dict[str, list[float]] = {name: [] for name in requests}
        ended: list[tuple[int, float]] = []
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as beside:
            beside.submit(os.getpid).result()  # it has started
            for _ in range(ROUNDS):  # in turns, since the machine has moods
                for name, send in requests.items():
                    alone[name] += latencies_s(send, seconds / ROUNDS)
                holding = beside.submit(
                    hold, server.url, num_connections, OPENING_S + len(requests) * seconds / ROUNDS + 2
                )
                time.sleep(OPENING_S + 1)
                for name, send in requests.items():
                    crowded[name] += latencies_s(send, seconds / ROUNDS)
                ended += holding.result()
    found = []
    for name in requests:
        quantiles = [
            float(np.quantile(times, share)) for times in (alone[name], crowded[name]) for share in (0.5, 0.99)
        ]
        found.append(Latency(name, len(crowded[name]), *quantiles))
    statuses = dict(Counter(status for status, _ in ended))
    return found, Ended(statuses, round(max(held_s for _, held_s in ended), 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Latency without and with slow connections.")
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0, help="per kind of request, without and with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder, serving(None, Path(folder)) as server:
        found, ended = measure(server, options.connections, options.seconds)
    for one in found:
        print(
            f"{one.request:24} p50 {one.alone_p50_s * 1000:6.1f} → {one.beside_p50_s * 1000:6.1f} ms   "
            f"p99 {one.alone_p99_s * 1000:6.1f} → {one.beside_p99_s * 1000:6.1f} ms   {one.ratio:.2f} ×"
            f"{'' if one.ratio <= MAX_RATIO else '   over twice'}"
        )
    print(f"slow connections by the status that ended them: {ended.statuses}; the longest took {ended.max_held_s} s")
    if ended.max_held_s > MAX_HELD_S:
        print(f"FAIL  a slow connection was held for more than {MAX_HELD_S:.0f} s")
    if options.json:
        figures = {
            "connections": options.connections,
            "latencies": [{**asdict(one), "ratio": round(one.ratio, 2)} for one in found],
            "ended": asdict(ended),
            "load_average": round(os.getloadavg()[0], 2),
        }
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
