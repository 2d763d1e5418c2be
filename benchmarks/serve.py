"""Whole requests over HTTP, one after the other, pictures as PNG: what a client waits for.

    python -m benchmarks.serve MODEL [--flags "--no-decode-graphs"] [--cases 1024:40,1024:40:edit] [--json FILE]

Starts the service on MODEL (a checkpoint folder; `benchmarks.real_size` writes one of the published size), waits until
it is ready and asks `--repeats` times for each case, `SIDE:STEPS[:edit]`; the first answer of a case is not counted.
Afterwards `--prompts` prompts of random lengths, two steps each, say how often a step found its graph.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.environment import environment

WORDS = [
    "a",
    "red",
    "circle",
    "and",
    "blue",
    "star",
    "on",
    "the",
    "wide",
    "green",
    "field",
    "under",
    "one",
    "old",
    "bright",
    "sky",
    "with",
    "many",
    "small",
    "white",
    "birds",
]


@dataclass(frozen=True, slots=True)
class Case:
    side_px: int
    steps: int
    edit: bool

    @classmethod
    def parse(cls, text: str) -> Case:
        side, steps, *edit = text.split(":")
        return cls(int(side), int(steps), edit == ["edit"])

    def __str__(self) -> str:
        return f"{self.side_px}² {self.steps} steps" + (" edit" if self.edit else "")


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds as the client saw them, and the median answer's own split of them."""

    case: Case
    median_s: float
    fastest_s: float
    slowest_s: float
    metrics: dict[str, float]
    file_bytes: int

    @property
    def beside_steps_s(self) -> float:
        return self.median_s - self.metrics["steps_seconds"]


@contextmanager
def service(model: str, flags: Sequence[str]) -> Iterator[tuple[str, float]]:
    """A running service: its address, and how many seconds it took to be ready."""
    command = [sys.executable, "-m", "app", "serve", model, "--port", "0", *flags]
    started_s = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            print(f"  | {line.rstrip()}", flush=True)
            if found := re.search(r"http://[\d.]+:\d+", line):
                url = found.group()
            if "ready to draw" in line:
                break
        if process.poll() is not None:
            raise SystemExit("the service ended")
        ready_s = time.monotonic() - started_s
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that its log never blocks it
        yield url, ready_s
    finally:
        process.terminate()
        process.wait(timeout=60)


def picture(seed: int) -> bytes:
    """A photograph-like picture of 1024²: smooth shapes and some noise. No two are equal, so no cache knows them."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((1024, 1024), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = np.clip(smooth + draw.integers(-8, 8, smooth.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "PNG", compress_level=1)
    return file.getvalue()


def ask(client: httpx.Client, case: Case, prompt: str, seed: int) -> tuple[float, dict[str, Any]]:
    image = picture(seed) if case.edit else b""
    started_s = time.perf_counter()
    if case.edit:
        fields = {"prompt": prompt, "seed": str(seed), "num_inference_steps": str(case.steps)}
        fields["size"] = f"{case.side_px}x{case.side_px}"
        answer = client.post("/v1/images/edits", data=fields, files={"image": ("input.png", image)})
    else:
        body = {"prompt": prompt, "seed": seed, "num_inference_steps": case.steps}
        answer = client.post("/v1/images/generations", json=body | {"size": f"{case.side_px}x{case.side_px}"})
    elapsed_s = time.perf_counter() - started_s
    if answer.status_code != 200:
        raise SystemExit(f"{case}: {answer.status_code} {answer.text[:500]}")
    return elapsed_s, answer.json()


def measure(client: httpx.Client, case: Case, repeats: int) -> Figures:
    answers = []
    for number in range(repeats + 1):
        answers.append(ask(client, case, f"picture number {number} of a lighthouse at dusk", number))
    times = sorted(answers[1:], key=lambda answer: answer[0])
    _, median = times[len(times) // 2]
    seconds = [elapsed_s for elapsed_s, _ in times]
    file_bytes = len(base64.b64decode(median["data"][0]["b64_json"]))
    metrics = {name: value for name, value in median["metrics"].items() if isinstance(value, int | float)}
    return Figures(case, statistics.median(seconds), seconds[0], seconds[-1], metrics, file_bytes)


def graph_counts(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    return {name: float(count) for name, count in re.findall(r'easel_decode_graph_total{result="(\w+)"} (\S+)', text)}


def hit_rate(client: httpx.Client, prompts: int) -> float:
    """Share of steps that found their graph, over prompts of 1 to 400 words, after a first one."""
    draw = random.Random(7)
    ask(client, Case(512, 2, False), "first", 0)
    before = graph_counts(client)
    for number in range(prompts):
        ask(client, Case(512, 2, False), " ".join(draw.choices(WORDS, k=draw.randint(1, 400))), number)
    counted = {name: count - before.get(name, 0) for name, count in graph_counts(client).items()}
    return counted.get("hit", 0) / max(1, sum(counted.values()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--flags", default="", help="for `easel serve`")
    parser.add_argument("--cases", default="1024:8,1024:40,1024:50,512:40,1024:40:edit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    cases = [Case.parse(text) for text in args.cases.split(",")]
    with (
        service(args.model, shlex.split(args.flags)) as (url, ready_s),
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        print(f"ready after {ready_s:.1f} s")
        all_figures = []
        print("case                    median  fastest  slowest  beside steps     MB  split")
        for case in cases:
            figures = measure(client, case, args.repeats)
            all_figures.append(figures)
            split = " ".join(f"{name.removesuffix('_seconds')} {value:.3f}" for name, value in figures.metrics.items())
            seconds = f"{figures.median_s:8.3f} {figures.fastest_s:8.3f} {figures.slowest_s:8.3f}"
            size = f"{figures.beside_steps_s:13.3f} {figures.file_bytes / 1e6:6.2f}"
            print(f"{case!s:20s} {seconds} {size}  {split}", flush=True)
        rate = hit_rate(client, args.prompts) if args.prompts else None
        print(f"graph hits: {rate}; {graph_counts(client)}")
    if args.json is not None:
        requests = [asdict(figures) for figures in all_figures]
        report = {"environment": environment(), "flags": args.flags, "ready_s": ready_s, "requests": requests}
        report |= {"graph_hit_rate": rate, "prompts": args.prompts}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
