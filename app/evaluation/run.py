"""`easel eval`: draws held-out prompts and edits with the real engine, judges every picture, prints accuracy.

It measures the embedded checkpoint and others trained on its world of shapes; of any other it says only how well that
one draws shapes. Pictures are made as a client of the engine would get them, at the checkpoint's default steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from app.evaluation.render import draw
from app.evaluation.suite import (
    Case,
    Judged,
    edit_cases,
    judge,
    mean_edge_px,
    median_kept_db,
    scene_cases,
    scores,
    table,
)
from app.output import ProgressStream, write_file
from app.settings import Settings
from engine.engine import Engine
from engine.errors import EngineError
from engine.request import GenerationParams
from models.errors import CheckpointError

CONCURRENT = 8
SIDE_PX = 256


def evaluate(args: argparse.Namespace, settings: Settings) -> None:
    """Measure what `args` asks for; what can't be done ends in `SystemExit`."""
    if args.output is not None and not args.output.parent.is_dir():
        raise SystemExit(f"easel: {args.output.parent} is not a folder")
    cases = [*scene_cases(args.prompts, args.seed), *edit_cases(args.edits, args.seed)]
    if not cases:
        raise SystemExit("easel: nothing to measure")
    try:
        started = time.perf_counter()
        judged = asyncio.run(run_cases(cases, settings, args.steps))
    except (EngineError, CheckpointError) as error:
        raise SystemExit(f"easel: {error}") from error
    seconds = time.perf_counter() - started
    print(table(judged))
    print(f"{len(cases)} pictures in {seconds:.0f} s")
    if args.output is not None:
        write_report(judged, args.output, seconds)


async def run_cases(cases: Sequence[Case], settings: Settings, num_steps: int | None) -> list[Judged]:
    """Draw and judge all cases, several at a time, in their order."""
    engine = Engine(replace(settings.engine_config(), worker="inline"))
    free = asyncio.Semaphore(CONCURRENT)
    try:
        await engine.start()
        with tqdm(total=len(cases), unit="picture", file=ProgressStream()) as bar:

            async def run_one(number: int, case: Case) -> Judged:
                async with free:
                    picture = await draw_case(engine, case, f"eval-{number}", num_steps)
                    judged = await asyncio.to_thread(judge, case, picture)
                bar.update()
                return judged

            return list(await asyncio.gather(*(run_one(number, case) for number, case in enumerate(cases))))
    finally:
        await engine.stop(0)


async def draw_case(engine: Engine, case: Case, request_id: str, num_steps: int | None = None) -> np.ndarray:
    """The engine's picture of one case, (height, width, 4) uint8."""
    sources = draw(case.sources, SIDE_PX, SIDE_PX) if case.sources else ()
    params = GenerationParams(
        prompt=case.prompt,
        seed=case.seed,
        condition_images=tuple(Image.fromarray(source) for source in sources),
        resolution_px=SIDE_PX,
        num_steps=num_steps,
    )
    result = await engine.generate(params, request_id=request_id)
    return result.images[0].pixels


def write_report(judged: Sequence[Judged], path: Path, seconds: float) -> None:
    """The scores as JSON, with every case that is not all right."""
    wrong = [
        {
            "prompt": one.case.prompt,
            "seed": one.case.seed,
            "wrong": [name for name, right in one.verdict.items() if not right],
        }
        for one in judged
        if not all(one.verdict.values())
    ]
    report = {
        "scores": [asdict(score) for score in scores(judged)],
        "edge_px": mean_edge_px(judged),
        "kept_db": median_kept_db(judged),
        "seconds": round(seconds, 1),
        "wrong": wrong,
    }
    write_file(path, (json.dumps(report, indent=2) + "\n").encode())
