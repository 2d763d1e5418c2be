"""How far a picture moves when it shares its steps with others, and that `deterministic` keeps it from moving at all.

    python -m benchmarks.determinism [--model FOLDER] [--device cpu] [--json FILE]

The same request always gives the same bytes when it is alone. In a batch the matrix products have other shapes, sum in
another order and round differently; this prints by how much, in float32 and bfloat16, for batches of several kinds. The
worker is told to fill its batches whether or not that pays, and each row shows how many pictures shared a step.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.pictures import as_json, psnr_db
from engine.config import EngineConfig
from engine.cost_model import CostModel
from engine.engine import Engine
from engine.loading import load_runner
from engine.memory import UNLIMITED
from engine.profile import Profile
from engine.request import GenerationParams, GenerationResult, Progress, RequestEvent
from engine.runner import Runner
from models.folder import embedded_checkpoint

MIN_CONTRAST = 20.0  # standard deviation, of 255; a flat picture would hide a difference
MIN_PSNR_DB = {"float32": 60.0, "bfloat16": 25.0}
NUM_STEPS = 4
SUBJECT = GenerationParams("a red circle on a white background", seed=7, size_px=(128, 96), num_steps=NUM_STEPS)
GUIDED = replace(SUBJECT, negative_prompt="a blue square", true_cfg_scale=4.0)
LONG_PROMPT = "a blue square, a green star and a red circle on a plain white background " * 8

# What the subject shares its steps with. `late` neighbours are under way when it comes.
COMPOSITIONS: dict[str, tuple[GenerationParams, tuple[GenerationParams, ...], bool]] = {
    "one like it": (SUBJECT, (replace(SUBJECT, seed=8),), False),
    "three like it": (SUBJECT, tuple(replace(SUBJECT, seed=8 + index) for index in range(3)), False),
    "longer prompts": (SUBJECT, (replace(SUBJECT, prompt=LONG_PROMPT), replace(SUBJECT, prompt="a star")), False),
    "a guided neighbour": (SUBJECT, (GUIDED,), False),
    "guided itself": (GUIDED, (replace(GUIDED, seed=9),), False),
    "three pictures of one": (SUBJECT, (replace(SUBJECT, seed=20, num_images=3),), False),
    "joins two under way": (SUBJECT, tuple(replace(SUBJECT, seed=8 + i, num_steps=8) for i in range(2)), True),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One composition in one dtype. `deterministic_equal` is whether the bytes of the same request, asked for with
    `deterministic` among the same neighbours, are those of the request alone."""

    dtype: str
    composition: str
    pictures_per_step: float
    psnr_db: float
    contrast: float
    alone_equal: bool
    deterministic_equal: bool

    @property
    def passed(self) -> bool:
        telling = self.contrast >= MIN_CONTRAST and self.pictures_per_step > 1
        return telling and self.alone_equal and self.deterministic_equal and self.psnr_db >= MIN_PSNR_DB[self.dtype]


class FillingRunner(Runner):
    """Shares steps even where the device has no use for it."""

    def profile(self, max_rows: int) -> Profile:
        return Profile(CostModel(), UNLIMITED, token_budget=2**31)


def load_filling_runner(config: EngineConfig) -> Runner:
    runner = load_runner(config)
    return FillingRunner(runner.model, runner.max_target_tokens)


async def compare(config: EngineConfig) -> AsyncIterator[Row]:
    """Every composition on one engine."""
    engine = Engine(config, load=functools.partial(load_filling_runner, config))
    await engine.start()
    try:
        for name in COMPOSITIONS:
            yield await _compare(engine, config.dtype, name)
    finally:
        await engine.stop(drain_s=0)


async def _compare(engine: Engine, dtype: str, name: str) -> Row:
    subject, neighbours, late = COMPOSITIONS[name]
    alone = [await engine.generate(subject, request_id="alone") for _ in range(2)]
    batched = await _among(engine, subject, neighbours, late)
    deterministic = await _among(engine, replace(subject, deterministic=True), neighbours, late)
    return Row(
        dtype=dtype,
        composition=name,
        pictures_per_step=batched.timings.batch_size,
        psnr_db=psnr_db(_pixels(batched), _pixels(alone[0])),
        contrast=float(_pixels(alone[0])[..., :3].std()),
        alone_equal=np.array_equal(_pixels(alone[0]), _pixels(alone[1])),
        deterministic_equal=np.array_equal(_pixels(deterministic), _pixels(alone[0])),
    )


async def _among(
    engine: Engine, subject: GenerationParams, neighbours: Sequence[GenerationParams], late: bool
) -> GenerationResult:
    under_way = asyncio.Event()

    def note(event: RequestEvent) -> None:
        if isinstance(event, Progress) and event.step >= 2:
            under_way.set()

    others = [
        asyncio.create_task(engine.generate(params, request_id=f"other {index}", on_event=note))
        for index, params in enumerate(neighbours)
    ]
    if late:
        await under_way.wait()
    result = await engine.generate(subject, request_id="subject")
    await asyncio.gather(*others)
    return result


def _pixels(result: GenerationResult) -> np.ndarray:
    return result.images[0].pixels


async def print_rows(configs: Sequence[EngineConfig]) -> list[Row]:
    """A table that grows as the figures come in."""
    print(f"{'dtype':9} {'shares its steps with':22} {'per step':>8} {'PSNR dB':>8}  alone  deterministic")
    rows = []
    for config in configs:
        async for row in compare(config):
            print(
                f"{row.dtype:9} {row.composition:22} {row.pictures_per_step:8.1f} {row.psnr_db:8.1f}  "
                f"{'equal' if row.alone_equal else 'DIFFERS':6} "
                f"{'equal' if row.deterministic_equal else 'DIFFERS':7} {'' if row.passed else 'FAIL'}",
                flush=True,
            )
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Solo against batched, and deterministic requests under load.")
    parser.add_argument("--model", default=str(embedded_checkpoint()))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=list(MIN_PSNR_DB), default=list(MIN_PSNR_DB))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    configs = [EngineConfig(model=options.model, device=options.device, dtype=dtype) for dtype in options.dtypes]
    rows = asyncio.run(print_rows(configs))
    if options.json:
        options.json.write_text(as_json([asdict(row) for row in rows]))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
