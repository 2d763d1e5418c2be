"""Peak GPU memory of one picture, by what is kept in FP8, under a hard cap.

    python -m benchmarks.memory MODEL [--side 1024] [--modes bf16,fp8] [--json FILE]

Each mode runs in a process of its own: it may not take more than its cap from the GPU (PyTorch's own memory fraction),
loads the checkpoint and draws one picture with two steps, which need what forty need. `benchmarks.real_size` writes a
checkpoint of the published size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.loading import load_preparer, load_runner, model_card, read_configs
from engine.request import GenerationParams
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Sample
from models.precision import Precision

FP8 = Precision(transformer="fp8", text_encoder="fp8")
MODES: dict[str, tuple[float, Precision]] = {"bf16": (36, Precision()), "fp8": (21, FP8)}  # cap in GiB
PROMPT = "a lighthouse at dusk, waves below it, and a sky with a few bright stars"


@dataclass(frozen=True, slots=True)
class Figures:
    """GiB. `peak` is what tensors took, `reserved` what PyTorch took of the GPU for them, never more than `cap`."""

    mode: str
    side_px: int
    cap: float
    weights: float
    peak: float
    reserved: float


def draw(model: str, mode: str, side_px: int) -> Figures:
    """Load and draw under the mode's cap. Raises `torch.OutOfMemoryError` when it does not fit."""
    cap, precision = MODES[mode]
    torch.cuda.set_per_process_memory_fraction(cap * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    config = EngineConfig(model=model, device="cuda", precision=precision)
    configs = read_configs(config)
    runner = load_runner(config)
    weights = torch.cuda.memory_allocated()
    params = GenerationParams(PROMPT, seed=0, size_px=(side_px, side_px), num_steps=2)
    request = load_preparer(configs, model_card(config, configs)).prepare(params, "request", 0.0).request
    runner.add(request)
    steps = [DenoiseStep(request.batch_key, (Sample("request", 0, step),)) for step in range(2)]
    for work in (EncodePrompt("request"), Prefill("request"), *steps, DecodeImage("request", 0)):
        runner.run(work)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Figures(mode, side_px, cap, *(round(held / 2**30, 2) for held in (weights, peak, reserved)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--one", choices=list(MODES), help="run one mode in this process and print its figures")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(asdict(draw(args.model, args.one, args.side))))
        return
    print("mode   side   cap GiB  weights     peak  reserved")
    rows = []
    for mode in args.modes.split(","):
        command = [sys.executable, "-m", "benchmarks.memory", args.model, "--side", str(args.side), "--one", mode]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            print(f"{mode}: does not fit, or failed")
            continue
        row = Figures(**json.loads(done.stdout.splitlines()[-1]))
        rows.append(asdict(row))
        print(
            f"{mode:6} {row.side_px:4} {row.cap:9.0f} {row.weights:8.2f} {row.peak:8.2f} {row.reserved:9.2f}",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
