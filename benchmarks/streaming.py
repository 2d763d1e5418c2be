"""What partial pictures cost, and when the first one comes, on a live server that does nothing else.

    python -m benchmarks.streaming URL [--side 1024] [--steps 40] [--partials 3] [--repeats 5] [--json FILE]

Plain and streamed requests alternate, so that a machine that gets slower or faster meanwhile does it to both. Run it on
the server's machine, whose GPU and versions it notes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import httpx

from benchmarks.environment import environment


def ask(client: httpx.Client, fields: dict[str, object]) -> tuple[float, float | None]:
    """Seconds until the whole answer is there, and until the first partial picture of a stream is."""
    started_s = time.perf_counter()
    first_s = None
    with client.stream("POST", "/v1/images/generations", json=fields) as response:
        if response.status_code != 200:
            response.read()
            raise SystemExit(f"status {response.status_code}: {response.text[:300]}")
        for line in response.iter_lines():
            if first_s is None and line == "event: image_generation.partial_image":
                first_s = time.perf_counter() - started_s
    return time.perf_counter() - started_s, first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--partials", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plain: dict[str, object] = {
        "prompt": "a red circle and a blue star on a white background",
        "size": f"{args.side}x{args.side}",
        "num_inference_steps": args.steps,
        "seed": 1,
    }
    streamed = {**plain, "stream": True, "partial_images": args.partials}
    plain_s, streamed_s, first_s = [], [], []
    with httpx.Client(base_url=args.url, timeout=600, trust_env=False) as client:
        for number in range(args.repeats + 1):
            without_s, _ = ask(client, plain)
            with_s, first = ask(client, streamed)
            if number and first is not None:  # the first round warms up
                plain_s.append(without_s)
                streamed_s.append(with_s)
                first_s.append(first)
    median_s = statistics.median(plain_s)
    figures = {
        "environment": environment(),
        "side_px": args.side,
        "steps": args.steps,
        "partials": args.partials,
        "plain_s": round(median_s, 4),
        "streamed_s": round(statistics.median(streamed_s), 4),
        "cost_share": round(statistics.median(streamed_s) / median_s - 1, 4),
        "first_partial_s": round(statistics.median(first_s), 4),
        "first_partial_share": round(statistics.median(first_s) / statistics.median(streamed_s), 4),
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
