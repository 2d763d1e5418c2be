"""A runner that misbehaves for requests with certain seeds; everything else about it is real."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from engine.config import EngineConfig
from engine.loading import load_runner
from engine.runner import Runner
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Work
from models.vae import Vae

RAISE_AT_STEP_11 = 1_000_001
RAISE_IN_ENCODE = 1_000_002
NAN_AT_STEP_2 = 1_000_003
DISK_FULL_AT_STEP_2 = 1_000_004
OOM_IN_PREFILL = 1_000_011
OOM_IN_STEP = 1_000_012
OOM_IN_DECODE = 1_000_013
OOM_IN_BATCHES = 1_000_014  # fits alone, does not fit with others
OOM_IN_DECODE_OVER_256_PX = 1_000_015
OOM_IN_EVERY_TILE = 1_000_016
ABORT_AT_STEP_2 = 1_000_021
HANG_AT_STEP_2 = 1_000_022
LOSE_DEVICE_AT_STEP_2 = 1_000_023

FAILS_ALONE = {  # the code of the error that a request at fault ends with
    RAISE_AT_STEP_11: "internal_error",
    RAISE_IN_ENCODE: "internal_error",
    NAN_AT_STEP_2: "generation_failed",
    OOM_IN_PREFILL: "out_of_memory",
    OOM_IN_STEP: "out_of_memory",
    OOM_IN_DECODE: "out_of_memory",
    OOM_IN_EVERY_TILE: "out_of_memory",
}
DECODES_PX = {OOM_IN_DECODE_OVER_256_PX: 256, OOM_IN_EVERY_TILE: 0}  # the longest side that the VAE has memory for


class FaultyRunner(Runner):
    """Real in everything but the seeds above. With `ahead` it lets steps be started and finished apart, as on a GPU."""

    ahead = False

    @property
    def runs_ahead(self) -> bool:
        return self.ahead

    def start(self, step: DenoiseStep) -> None:
        assert len(self._begun_s) < 2, "more than one step ahead"
        begun_s = time.monotonic()
        self.run(step)
        self._begun_s.append(begun_s)

    def finish(self) -> float:
        return time.monotonic() - self._begun_s.popleft()

    @functools.cached_property
    def _begun_s(self) -> deque[float]:
        return deque()

    def _run(self, work: Work) -> np.ndarray | None:
        samples = work.samples if isinstance(work, DenoiseStep) else ()
        request_ids = {sample.request_id for sample in samples} or {work.request_id}  # type: ignore[union-attr]
        seeds = {self._states[request_id].request.seeds[0] for request_id in request_ids}
        steps = {self._states[sample.request_id].request.seeds[0]: sample.step for sample in samples}
        if steps.get(RAISE_AT_STEP_11) == 10 or (RAISE_IN_ENCODE in seeds and isinstance(work, EncodePrompt)):
            raise RuntimeError("a secret detail that no client may see")
        if steps.get(DISK_FULL_AT_STEP_2) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/secret/folder")
        if (
            (OOM_IN_PREFILL in seeds and isinstance(work, Prefill))
            or OOM_IN_STEP in steps
            or (OOM_IN_DECODE in seeds and isinstance(work, DecodeImage))
            or (OOM_IN_BATCHES in steps and len(samples) > 1)
        ):
            raise torch.OutOfMemoryError("injected")
        if steps.get(ABORT_AT_STEP_2) == 1:
            os.abort()
        if steps.get(HANG_AT_STEP_2) == 1:
            time.sleep(3600)
        if steps.get(LOSE_DEVICE_AT_STEP_2) == 1:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        fitting_px = min((DECODES_PX[seed] for seed in seeds if seed in DECODES_PX), default=None)
        if fitting_px is None or not isinstance(work, DecodeImage):
            result = super()._run(work)
        else:
            with decoding_at_most(self.model.vae, fitting_px):
                result = super()._run(work)
        for sample in samples:
            if sample.step == 1 and self._states[sample.request_id].request.seeds[0] == NAN_AT_STEP_2:
                self._states[sample.request_id].latents[sample.image_index].fill_(float("nan"))
        return result


@contextlib.contextmanager
def decoding_at_most(vae: Vae, side_px: int) -> Iterator[None]:
    """Let the VAE run out of memory on anything larger."""
    decode = vae.decode

    def limited(latents: torch.Tensor) -> torch.Tensor:
        if max(latents.shape[-2:]) * vae.config.spatial_ratio > side_px:
            raise torch.OutOfMemoryError("injected")
        return decode(latents)

    vae.decode = limited  # type: ignore[method-assign]
    try:
        yield
    finally:
        del vae.decode


def load_faulty_runner(config: EngineConfig) -> FaultyRunner:
    runner = load_runner(config)
    return FaultyRunner(runner.model, runner.max_target_tokens)
