"""Peak GPU memory of one picture, and its time, by what is in FP8 and what waits in host memory, under a hard cap.

    python -m benchmarks.memory MODEL [--side 1024] [--modes bf16,fp8] [--decode-side 4096] [--json FILE]

Each mode runs in a process of its own: it may not take more than its cap from the GPU (PyTorch's own memory fraction),
loads the checkpoint and draws a picture twice, of which the second is timed, in `STEPS` steps, which need what forty
need. Then the VAE alone decodes a picture of `--decode-side`, in tiles, with a cap of 8 GiB over its weights.
`benchmarks.real_size` writes a checkpoint of the published size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.environment import environment
from engine.config import EngineConfig
from engine.loading import load_preparer, load_runner, model_card, read_configs
from engine.request import GenerationParams
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Sample
from models.checkpoint import TensorFiles, load_weights
from models.config import CheckpointConfigs
from models.precision import AS_STORED, Precision
from models.tiling import TiledVae
from models.vae import UNUSED_WEIGHTS, Vae

FP8 = Precision(transformer="fp8", text_encoder="fp8")
MODES: dict[str, tuple[float, Precision, str]] = {  # cap in GiB, precision, offload
    "bf16": (36, AS_STORED, "none"),
    "fp8": (21, FP8, "none"),
    "bf16_component": (20, AS_STORED, "component"),
    "fp8_component": (12, FP8, "component"),
    "bf16_block": (8, AS_STORED, "block"),
    "fp8_block": (8, FP8, "block"),
}
DECODE = "vae_decode"
DECODE_CAP = 8  # GiB over weights
STEPS = 10
PROMPT = "a lighthouse at dusk, waves below it, and a sky with a few bright stars"


@dataclass(frozen=True, slots=True)
class Figures:
    """GiB. `peak` is what tensors took, `reserved` what PyTorch took of the GPU for them, never more than `cap`.
    `seconds` are those of a picture in `STEPS` steps, or of a decode."""

    mode: str
    side_px: int
    cap: float
    weights: float
    peak: float
    reserved: float
    seconds: float


def draw(model: str, mode: str, side_px: int) -> Figures:
    """Load and draw under the mode's cap. Raises `torch.OutOfMemoryError` when it does not fit."""
    cap, precision, offload = MODES[mode]
    limit(cap)
    config = EngineConfig(
        model=model, device="cuda", precision=precision, offload=offload, max_output_pixels=side_px**2
    )
    configs = read_configs(config)
    runner = load_runner(config)
    weights = torch.cuda.memory_allocated()
    preparer = load_preparer(configs, model_card(config, configs))
    seconds = 0.0
    for name in ("first", "second"):
        params = GenerationParams(f"{PROMPT}, {name}", seed=0, size_px=(side_px, side_px), num_steps=STEPS)
        request = preparer.prepare(params, name, 0.0).request
        runner.add(request)
        steps = [DenoiseStep(request.batch_key, (Sample(name, 0, step),)) for step in range(STEPS)]
        started_s = time.perf_counter()
        for work in (EncodePrompt(name), Prefill(name), *steps, DecodeImage(name, 0)):
            runner.run(work)
        seconds = time.perf_counter() - started_s
        runner.remove(name)
    return figures(mode, side_px, cap, weights, seconds)


def decode(model: str, side_px: int) -> Figures:
    """Load the VAE and decode noise in tiles."""
    device, dtype, configs = torch.device("cuda"), torch.bfloat16, CheckpointConfigs.read(Path(model))
    with torch.device("meta"):
        vae = Vae(configs.vae)
    files = TensorFiles(configs.folder / "vae", "diffusion_pytorch_model")
    load_weights(vae, files, dtype=dtype, device=device, unused=UNUSED_WEIGHTS)
    vae.fuse()
    weights = torch.cuda.memory_allocated()
    limit(DECODE_CAP + weights / 2**30)
    cells = side_px // configs.vae.spatial_ratio
    latents = torch.randn(1, configs.vae.z_dim, cells, cells, device=device, dtype=dtype)
    seconds = 0.0
    with torch.inference_mode():
        for _ in range(2):
            started_s = time.perf_counter()
            TiledVae(vae, "auto").decode(latents)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started_s
    return figures(DECODE, side_px, DECODE_CAP + weights / 2**30, weights, seconds)


def limit(cap_gib: float) -> None:
    torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)


def figures(mode: str, side_px: int, cap: float, weights: int, seconds: float) -> Figures:
    held = (weights, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return Figures(
        mode, side_px, round(cap, 2), *(round(num_bytes / 2**30, 2) for num_bytes in held), round(seconds, 3)
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--decode-side", type=int, default=4096, help="0 leaves this out")
    parser.add_argument("--one", choices=[*MODES, DECODE], help="run one mode in this process and print its figures")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.one is not None:
        one = decode(args.model, args.side) if args.one == DECODE else draw(args.model, args.one, args.side)
        print(json.dumps(asdict(one)))
        return
    print("mode            side   cap GiB  weights     peak  reserved  seconds")
    rows = []
    runs = [(mode, args.side) for mode in args.modes.split(",") if mode]
    for mode, side in runs + [(DECODE, args.decode_side)] * bool(args.decode_side):
        command = [sys.executable, "-m", "benchmarks.memory", args.model, "--side", str(side), "--one", mode]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            print(f"{mode}: does not fit, or failed")
            continue
        row = Figures(**json.loads(done.stdout.splitlines()[-1]))
        rows.append(asdict(row))
        print(
            f"{mode:14} {row.side_px:5} {row.cap:9.1f} {row.weights:8.2f} {row.peak:8.2f} {row.reserved:9.2f} "
            f"{row.seconds:8.2f}",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
