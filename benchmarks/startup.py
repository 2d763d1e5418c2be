"""From `easel serve` to the first picture of the embedded checkpoint: when there are port, engine and picture.

python -m benchmarks.startup [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.server import START_TIMEOUT_S, serving

PROMPT = {"prompt": "a red circle on a white background", "seed": 7}


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds since the command was given."""

    port_s: float
    ready_s: float
    picture_s: float


def start_once() -> Startup:
    """One start, in a process of its own, with the files as they lie in the machine's cache."""
    started_s = time.monotonic()
    with TemporaryDirectory() as folder, serving(None, Path(folder), ready=False) as server:
        port_s = time.monotonic() - started_s
        server.wait_until_ready(time.monotonic() + START_TIMEOUT_S)
        ready_s = time.monotonic() - started_s
        httpx.post(f"{server.url}/v1/images/generations", json=PROMPT, timeout=60).raise_for_status()
        return Startup(port_s, ready_s, time.monotonic() - started_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Seconds from the command to the first picture.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = [start_once() for _ in range(options.rounds)]
    for one in found:
        print(f"port {one.port_s:5.1f} s   ready {one.ready_s:5.1f} s   first picture {one.picture_s:5.1f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
