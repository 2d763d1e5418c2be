"""Workers that are killed, crash, hang or lose their device: nothing is lost, nothing is answered twice."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.engine import Engine, EngineState, Observation, WorkerRestarted
from engine.errors import GenerationFailed, NotReady
from engine.request import GenerationParams
from tests.engine import faults
from tests.engine.conftest import running
from tests.oracle import psnr_db

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


async def test_killed_again_and_again_under_load_nothing_is_lost(checkpoint: Path) -> None:
    """SIGKILL from outside blames nobody, however often it hits the same request."""
    kills, clients = 3, 6
    observed: list[Observation] = []
    async with running(checkpoint, worker="process", observe=observed.append) as engine:
        expected = [await draw(engine, seed) for seed in range(clients)]
        tasks = [asyncio.create_task(draw(engine, seed, num_steps=30)) for seed in range(clients)]
        tasks += [asyncio.create_task(draw(engine, 50 + seed, size_px=(256, 256))) for seed in range(2)]
        pids = set()
        for _ in range(kills):
            await ready(engine)
            await asyncio.sleep(random.uniform(0.02, 0.2))
            pids.add(worker_of(engine))
            os.kill(worker_of(engine), signal.SIGKILL)
            async with asyncio.timeout(RESTART_TIMEOUT_S):
                while engine.state is EngineState.READY:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            with pytest.raises(NotReady) as refused:
                await draw(engine, 99)
            assert refused.value.retry_after_s > 0
        pictures = await asyncio.gather(*tasks)
        assert len(pids) == kills == sum(isinstance(seen, WorkerRestarted) for seen in observed)
        assert not any(alive(pid) for pid in pids)
        for picture, alone in zip(pictures, expected, strict=False):
            assert psnr_db(picture, alone) > 50
        last = worker_of(engine)
    assert not alive(last)


@pytest.mark.parametrize("seed", [faults.ABORT_AT_STEP_2, faults.LOSE_DEVICE_AT_STEP_2])
async def test_a_request_that_kills_two_workers_fails_alone(checkpoint: Path, seed: int) -> None:
    observed: list[Observation] = []
    async with running(checkpoint, worker="process", faulty=True, observe=observed.append) as engine:
        alone = await draw(engine, 1)
        poison = asyncio.create_task(draw(engine, seed))
        neighbour = asyncio.create_task(draw(engine, 1))
        with pytest.raises(GenerationFailed) as caught:
            await poison
        assert caught.value.code == "worker_died"
        assert psnr_db(await neighbour, alone) > 50
        assert sum(isinstance(seen, WorkerRestarted) for seen in observed) == 2
        await ready(engine)
        assert psnr_db(await draw(engine, 1), alone) > 50


async def test_a_stopped_worker_is_found_and_replaced(checkpoint: Path) -> None:
    async with running(checkpoint, worker="process", hang_timeout_s=4.0) as engine:
        alone = await draw(engine, 1)
        task = asyncio.create_task(draw(engine, 1))
        await asyncio.sleep(0.05)
        stopped = worker_of(engine)
        os.kill(stopped, signal.SIGSTOP)
        assert psnr_db(await asyncio.wait_for(task, RESTART_TIMEOUT_S), alone) > 50
        assert not alive(stopped)
        assert engine.state is EngineState.READY


async def test_a_request_that_hangs_two_workers_fails_alone(checkpoint: Path) -> None:
    async with running(checkpoint, worker="process", faulty=True, hang_timeout_s=4.0) as engine:
        with pytest.raises(GenerationFailed) as caught:
            await draw(engine, faults.HANG_AT_STEP_2)
        assert caught.value.code == "worker_died"
        await ready(engine)
        assert (await draw(engine, 1)).shape == (64, 64, 4)


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
