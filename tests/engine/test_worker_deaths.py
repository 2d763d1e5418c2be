"""Workers that die with nothing to do, or for good. `tests/e2e` kills, stops and crashes them under their requests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.engine import Engine, EngineState
from engine.request import GenerationParams
from tests.engine.conftest import running

GOOD = GenerationParams("a red circle", seed=1, size_px=(64, 64), num_steps=30)
RESTART_TIMEOUT_S = 60


async def ready(engine: Engine) -> None:
    async with asyncio.timeout(RESTART_TIMEOUT_S):
        while engine.state is not EngineState.READY:  # noqa: ASYNC110 (the engine tells its state to whoever asks)
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def worker_of(engine: Engine) -> int:
    assert engine.worker_pid is not None
    return engine.worker_pid


async def draw(engine: Engine, seed: int, **changes: object) -> np.ndarray:
    result = await engine.generate(replace(GOOD, seed=seed, **changes), request_id=f"s{seed}")  # type: ignore[arg-type]
    return result.images[0].pixels


async def test_an_idle_worker_is_replaced_as_well(checkpoint: Path) -> None:
    async with running(checkpoint, worker="process") as engine:
        first = worker_of(engine)
        os.kill(first, signal.SIGKILL)
        await asyncio.sleep(0.2)
        await ready(engine)
        assert worker_of(engine) != first
        assert (await draw(engine, 1)).shape == (64, 64, 4)


async def test_a_worker_that_can_not_be_started_again_is_given_up(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    reasons: list[str] = []
    async with running(copy, worker="process") as engine:
        engine.on_failure(reasons.append)
        (copy / "vae" / "diffusion_pytorch_model.safetensors").unlink()
        os.kill(worker_of(engine), signal.SIGKILL)
        async with asyncio.timeout(RESTART_TIMEOUT_S):
            while not reasons:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert engine.state is EngineState.FAILED
        assert "vae" in reasons[0] and "vae" in str(engine.failure)
