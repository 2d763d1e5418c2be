"""Processor time of a service and its worker while nobody asks for anything.

    python -m benchmarks.idle [--seconds 30] [--model FOLDER] [--json FILE]

The exit status is 1 if they use more than `MAX_SHARE` of one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks.footprint import cpu_seconds
from benchmarks.pictures import as_json
from tests.server import serving

MAX_SHARE = 0.01
SETTLING_S = 3.0  # after a picture
ORDER = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 2}


def measure(model: Path | None, seconds: float) -> dict[str, float]:
    """CPU seconds of each process over `seconds`; `model` None means the embedded checkpoint."""
    with TemporaryDirectory() as folder, serving(model, Path(folder)) as server:
        httpx.post(f"{server.url}/v1/images/generations", json=ORDER, timeout=60).raise_for_status()
        time.sleep(SETTLING_S)
        [worker] = server.workers()
        before = cpu_seconds(server.process.pid), cpu_seconds(worker)
        time.sleep(seconds)
        return {
            "seconds": seconds,
            "service_cpu_s": round(cpu_seconds(server.process.pid) - before[0], 2),
            "worker_cpu_s": round(cpu_seconds(worker) - before[1], 2),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Processor time of a service that nobody uses.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = measure(options.model, options.seconds)
    share = (found["service_cpu_s"] + found["worker_cpu_s"]) / options.seconds
    print(f"{share:.2%} of a core: service {found['service_cpu_s']} s, worker {found['worker_cpu_s']} s")
    if options.json:
        options.json.write_text(as_json(found))
    return 1 if share > MAX_SHARE else 0


if __name__ == "__main__":
    sys.exit(main())
