"""One request's fault is that request's alone: exceptions, memory, numbers that are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from engine.engine import Engine, Observation
from engine.errors import GenerationFailed
from engine.messages import OutOfMemoryRetried
from engine.request import GenerationParams, GenerationResult
from tests.engine import faults
from tests.engine.conftest import running
from tests.oracle import psnr_db

GOOD = GenerationParams("a red circle", seed=1, size_px=(64, 64), num_steps=14)


@pytest_asyncio.fixture
async def observed() -> list[Observation]:
    return []


@pytest.fixture(autouse=True, params=[False, True], ids=["each step waited for", "a step ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(faults.FaultyRunner, "ahead", request.param)
    return bool(request.param)


@pytest_asyncio.fixture
async def engine(checkpoint: Path, observed: list[Observation], ahead: bool) -> AsyncIterator[Engine]:
    async with running(checkpoint, faulty=True, observe=observed.append) as engine:
        yield engine


async def together(engine: Engine, *seeds: int) -> list[GenerationResult | BaseException]:
    tasks = (engine.generate(replace(GOOD, seed=seed), request_id=f"s{seed}") for seed in seeds)
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("seed", "code"), faults.FAILS_ALONE.items())
async def test_a_fault_in_a_batch_fails_alone(engine: Engine, seed: int, code: str) -> None:
    [expected] = await together(engine, 1)
    before, failed, after = await together(engine, 1, seed, 2)
    assert isinstance(failed, GenerationFailed)
    assert failed.code == code
    assert "secret" not in failed.message
    assert isinstance(expected, GenerationResult) and isinstance(before, GenerationResult)
    assert psnr_db(before.images[0].pixels, expected.images[0].pixels) > 50
    assert isinstance(after, GenerationResult)
    assert isinstance((await together(engine, 3))[0], GenerationResult)
    assert (engine.num_running, engine.num_waiting) == (0, 0)


async def test_a_batch_that_does_not_fit_is_halved(engine: Engine, observed: list[Observation]) -> None:
    results = await together(engine, faults.OOM_IN_BATCHES, 1, 2, 3)
    assert all(isinstance(result, GenerationResult) for result in results)
    assert any(isinstance(observation, OutOfMemoryRetried) for observation in observed)


async def test_a_step_that_does_not_fit_takes_the_memory_of_others(engine: Engine) -> None:
    """The others' prefixes are given up for the retry, and filled again: their pictures are the same."""
    other = replace(GOOD, seed=5, num_steps=40, size_px=(96, 64))
    alone = await engine.generate(other, request_id="alone")
    task = asyncio.create_task(engine.generate(other, request_id="other"))
    [failed] = await together(engine, faults.OOM_IN_STEP)
    assert isinstance(failed, GenerationFailed)
    assert psnr_db((await task).images[0].pixels, alone.images[0].pixels) > 50


async def test_a_picture_that_does_not_fit_the_vae_is_decoded_in_tiles(engine: Engine) -> None:
    """Neither the whole nor tiles of 512 px do; the next picture is decoded as a whole again."""
    large = replace(GOOD, size_px=(544, 288), num_steps=2)
    tiled = await engine.generate(replace(large, seed=faults.OOM_IN_DECODE_OVER_256_PX), request_id="tiled")
    assert tiled.images[0].pixels.shape == (288, 544, 4)
    whole = await engine.generate(large, request_id="whole")
    with pytest.raises(GenerationFailed) as failed:
        await engine.generate(replace(large, seed=faults.OOM_IN_EVERY_TILE), request_id="failed")
    assert failed.value.code == "out_of_memory"
    again = await engine.generate(large, request_id="again")
    assert psnr_db(again.images[0].pixels, whole.images[0].pixels) > 80
