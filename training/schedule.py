"""Training by the clock: how long is left, how high the learning rate is, when to report."""

from __future__ import annotations

import json
import time
from random import Random

import torch
from torch import Tensor

from app.evaluation.render import draw
from app.evaluation.scenes import draw_scene

WARMUP_STEPS = 100
DECAY_PART = 0.45  # of the time, at the end, over which the rate falls to zero


class Clock:
    """Time-boxed progress. The learning rate's factor rises over the first steps, stays, and falls linearly to zero
    over the last part of the time; `span` says which part of a longer training this run is."""

    def __init__(self, seconds: float, log_seconds: float, span: tuple[float, float] = (0.0, 1.0)) -> None:
        self.seconds, self.log_seconds, self.span = seconds, log_seconds, span
        self.started = self.reported = time.perf_counter()

    def restart(self) -> None:
        """Count from now: compiling is over."""
        self.started = self.reported = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def progress(self) -> float:
        """Of the whole training, from 0 to 1."""
        first, last = self.span
        return first + (last - first) * min(1.0, self.elapsed / self.seconds)

    def is_over(self) -> bool:
        return self.elapsed >= self.seconds

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1 - self.progress) / DECAY_PART)

    def is_due(self) -> bool:
        return time.perf_counter() - self.reported >= self.log_seconds

    def report(self, **values: float) -> None:
        rounded = {name: round(value, 4) for name, value in values.items()}
        print(json.dumps({"seconds": round(self.elapsed, 1), **rounded}), flush=True)
        self.reported = time.perf_counter()


def held_out_scenes(count: int, side_px: int) -> Tensor:
    """Pictures of held-out scenes, (count, 4, side, side) in [0, 1]."""
    rng = Random(7)
    scenes = [draw_scene(rng, lambda scene: scene.is_held_out) for _ in range(count)]
    return torch.from_numpy(draw(scenes, side_px, side_px)).permute(0, 3, 1, 2).float() / 255
