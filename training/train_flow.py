"""Trains text encoder and transformer together for a given time; saves everything that is needed to carry on.

`python -m training.train_flow --help`. State is a folder of safetensors files below 16 MiB: weights, their averages,
and the optimisers' moments.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.evaluation.suite import Case, Judged, edit_cases, judge, scene_cases, table
from models.vae import Vae
from training.encode import Encoded, SceneEncoder, Statistics
from training.examples import load_examples
from training.flow import Flow, Kind, flow_loss, totals
from training.muon import Average, Muon
from training.networks import new_text_encoder, new_transformer
from training.sample import Sampler
from training.schedule import Clock
from training.spec import SEED, VAE
from training.state import load_published, load_state, load_vae, save_state

HELP_UNTIL = 0.8  # of the training: then the throw-away heads are silent


def start_judges(processes: int) -> ProcessPoolExecutor:
    """Workers that judge pictures, forked before the device is touched."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("fork"))
    list(pool.map(_warm_up, range(processes * 2)))
    return pool


def _warm_up(_: int) -> None:
    torch.set_num_threads(1)
    time.sleep(0.2)


def draw_cases(sampler: Sampler, scenes: int, edits: int) -> tuple[list[Case], Tensor]:
    """Held-out cases and their final latents with the current weights, in the same order."""
    cases: list[Case] = [*scene_cases(scenes), *edit_cases(edits)]
    latents: list[Tensor | None] = [None] * len(cases)
    for num_images in range(3):
        indices = [index for index, case in enumerate(cases) if len(case.sources) == num_images]
        for start in range(0, len(indices), 250):
            part = indices[start : start + 250]
            drawn = sampler([cases[index].prompt for index in part], [cases[index].sources for index in part], SEED)
            for index, one in zip(part, drawn, strict=True):
                latents[index] = one
    return cases, torch.stack([one for one in latents if one is not None])


def measure(sampler: Sampler, pool: ProcessPoolExecutor, scenes: int, edits: int) -> tuple[list[Judged], Tensor]:
    """Draw and judge held-out cases with the current weights; also the pictures, in the same order."""
    cases, latents = draw_cases(sampler, scenes, edits)
    pictures = sampler.decode(latents)
    return list(pool.map(judge, cases, [picture.numpy() for picture in pictures], chunksize=4)), pictures


def save_grid(pictures: Tensor, path: Path, columns: int = 12) -> None:
    """Pictures over a fine pattern that shows through where they are transparent."""
    count = len(pictures) // columns * columns
    array = pictures[:count].numpy().astype(np.float32)
    pattern = 190.0 + 40 * ((np.indices(array.shape[1:3]).sum(0) // 8) % 2)[..., None]
    alpha = array[..., 3:] / 255
    over = (array[..., :3] * alpha + pattern * (1 - alpha)).astype(np.uint8)
    rows = over.reshape(-1, columns, *over.shape[1:]).transpose(0, 2, 1, 3, 4)
    grid = Image.fromarray(rows.reshape(rows.shape[0] * rows.shape[1], -1, 3))
    grid.resize((grid.width // 2, grid.height // 2), Image.Resampling.LANCZOS).save(path)


def encode_all(encoder: SceneEncoder, folder: Path, statistics: Statistics | None) -> tuple[list[Encoded], Statistics]:
    """Encode the examples in a folder, waiting for their last file; without statistics, they are measured first."""
    names = [folder / f"examples-{images}.safetensors" for images in range(3)]
    while not names[-1].exists():
        time.sleep(0.2)
    loaded = [load_examples(name) for name in names]
    statistics = statistics or encoder.statistics(loaded[0].scenes[slice(0, 8192)])
    return [encoder.encode(examples, statistics) for examples in loaded], statistics


def load_start(
    args: argparse.Namespace,
    flow: Flow,
    average: Average,
    muon: Muon,
    adam: torch.optim.Optimizer,
    device: torch.device,
) -> tuple[Vae, Statistics | None]:
    """The autoencoder, and the latents' statistics where the networks do not start from scratch."""
    if args.start:
        vae, found = load_published(args.start, flow, average)
        return vae.to(device), Statistics(found.mean.to(device), found.std.to(device))
    statistics = load_state(args.resume, flow, average, muon, adam, device) if args.resume else None
    return load_vae(Vae(VAE), args.vae).to(device), statistics


def train(args: argparse.Namespace) -> None:
    pool = start_judges(args.processes)
    started = time.perf_counter()
    device = torch.device(args.device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    flow = Flow(new_text_encoder(args.processor), new_transformer()).to(device)
    muon, adam = flow.optimisers()
    average = Average(flow)
    vae, statistics = load_start(args, flow, average, muon, adam, device)
    encoder = SceneEncoder(vae, device, compiled=args.compile)
    encoded, statistics = encode_all(encoder, args.warm_up or args.examples, statistics)
    kinds = [Kind(flow, one, args.processor, device) for one in encoded]
    sampler = Sampler(flow, vae, statistics, args.processor, device)
    generator = torch.Generator(device).manual_seed(SEED + int(1000 * args.span[0]))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        if args.compile:
            for kind in kinds:
                kind.joint.compile()
            for _ in range(2):
                backward(args, flow, kinds, generator, 1.0)
            _forget_gradients(flow)
        print(f"{time.perf_counter() - started:.0f} s: compiled", flush=True)
        if args.warm_up:
            for kind, one in zip(kinds, encode_all(encoder, args.examples, statistics)[0], strict=True):
                kind.use(one)
        print(f"{time.perf_counter() - started:.0f} s: encoded {[len(kind.encoded) for kind in kinds]}", flush=True)
        left = args.deadline - (time.perf_counter() - started)
        clock = Clock(min(args.seconds, left), args.log, tuple(args.span))
        step = 0
        while not clock.is_over():
            losses = _step(args, flow, kinds, clock, muon, adam, generator, step)
            average.update(args.average if args.resume else min(args.average, (step + 1) / (step + 20)))
            if clock.is_due():
                clock.report(step=step, progress=clock.progress, **losses_of(losses))
                if clock.progress > args.next_measure:
                    args.next_measure = clock.progress + args.measure_every
                    _report(args, average, sampler, pool, 96, 36, "progress")
            step += 1
    save_state(args.output, flow, average, muon, adam, statistics)
    print(f"{step} steps, {time.perf_counter() - started:.0f} s in all", flush=True)
    if args.latents:
        average.swap()
        save_file({"latents": draw_cases(sampler, args.scenes, args.edits)[1].half().cpu()}, args.latents)
    else:
        _report(args, average, sampler, pool, args.scenes, args.edits, "final")
    print(f"{time.perf_counter() - started:.0f} s with the measurement", flush=True)
    pool.shutdown()


def losses_of(losses: list[dict[str, Tensor]]) -> dict[str, float]:
    return {f"{name}{images}": value for images, part in enumerate(losses) for name, value in totals(part).items()}


def _step(
    args: argparse.Namespace,
    flow: Flow,
    kinds: list[Kind],
    clock: Clock,
    muon: Muon,
    adam: torch.optim.Optimizer,
    generator: torch.Generator,
    step: int,
) -> list[dict[str, Tensor]]:
    """One update from a batch of every kind."""
    factor = clock.rate(10**6 if args.resume else step)
    reported = backward(args, flow, kinds, generator, 1.0 if clock.progress < HELP_UNTIL else 0.0)
    adam.param_groups[0]["lr"] = args.adam_rate * factor
    torch.nn.utils.clip_grad_norm_(adam.param_groups[0]["params"], 1.0)
    muon.step(args.muon_rate * factor)
    adam.step()
    _forget_gradients(flow)
    return reported


def backward(
    args: argparse.Namespace, flow: Flow, kinds: list[Kind], generator: torch.Generator, help_by: float
) -> list[dict[str, Tensor]]:
    """Gradients of a batch of every kind, each weighed by its rows."""
    reported = []
    for kind, rows in zip(kinds, args.rows, strict=True):
        with torch.autocast(generator.device.type, torch.bfloat16, enabled=generator.device.type == "cuda"):
            losses = flow_loss(flow, kind.joint, kind.draw(rows, generator), generator, help_by)
        (losses["total"] * (rows / sum(args.rows)) ** args.row_power).backward()
        reported.append(losses)
    return reported


def _forget_gradients(flow: Flow) -> None:
    for parameter in flow.parameters():
        parameter.grad = None


def _report(
    args: argparse.Namespace,
    average: Average,
    sampler: Sampler,
    pool: ProcessPoolExecutor,
    scenes: int,
    edits: int,
    name: str,
) -> None:
    average.swap()
    judged, pictures = measure(sampler, pool, scenes, edits)
    print(table(judged), flush=True)
    if args.grids:
        save_grid(torch.cat([pictures[: min(96, scenes)], pictures[scenes : scenes + 48]]), args.grids / f"{name}.png")
    average.swap()


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--processor", type=Path, required=True)
    options.add_argument("--examples", type=Path, required=True)
    options.add_argument("--warm-up", type=Path, help="a few examples to compile with while --examples are being made")
    options.add_argument("--latents", type=Path, help="file for the measured cases' latents, to be judged elsewhere")
    options.add_argument("--average", type=float, default=0.999, help="decay of the averaged weights")
    options.add_argument("--vae", type=Path, help="weights of the autoencoder; not needed with --start")
    options.add_argument("--output", type=Path, required=True, help="folder for the state")
    options.add_argument("--resume", type=Path, help="folder with a state to carry on from")
    options.add_argument("--start", type=Path, help="published checkpoint to start from, models/demo say; no moments")
    options.add_argument("--grids", type=Path, help="folder for sheets of pictures")
    options.add_argument("--seconds", type=float, default=480)
    options.add_argument("--deadline", type=float, default=1e9, help="seconds from the start when training ends")
    options.add_argument("--span", type=float, nargs=2, default=(0.0, 1.0), help="which part of the whole this run is")
    options.add_argument("--rows", type=int, nargs=3, default=(512, 128, 32))
    options.add_argument("--row-power", type=float, default=0.7, help="how far a kind's weight follows its rows")
    options.add_argument("--muon-rate", type=float, default=0.02)
    options.add_argument("--adam-rate", type=float, default=0.002)
    options.add_argument("--log", type=float, default=20, help="seconds between reports")
    options.add_argument("--measure-every", type=float, default=0.15, help="part of the whole between measurements")
    options.add_argument("--next-measure", type=float, default=0.1)
    options.add_argument("--scenes", type=int, default=500)
    options.add_argument("--edits", type=int, default=180)
    options.add_argument("--processes", type=int, default=12)
    options.add_argument("--device", default="cuda")
    options.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return options


if __name__ == "__main__":
    train(parser().parse_args())
