"""Previews: real, in order, cheap for the neighbours, and never shown twice."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.engine import Engine
from engine.prepare import preview_steps
from engine.request import Admitted, Finished, GenerationParams, GenerationResult, Preview, Progress, RequestEvent
from tests.engine.conftest import running
from tests.oracle import psnr_db

PARAMS = GenerationParams("a red circle", seed=1, size_px=(100, 70), num_steps=20, num_previews=3)


async def draw(engine: Engine, params: GenerationParams) -> tuple[GenerationResult, list[RequestEvent]]:
    events: list[RequestEvent] = []
    return await engine.generate(params, request_id="r", on_event=events.append), events


def previews_of(events: list[RequestEvent], image_index: int = 0) -> list[np.ndarray]:
    return [event.pixels for event in events if isinstance(event, Preview) and event.image_index == image_index]


@pytest.mark.parametrize(
    ("num_steps", "num_previews", "steps"),
    [
        (40, 0, ()),
        (40, 1, (11,)),
        (40, 2, (8, 17)),
        (40, 3, (7, 14, 21)),
        (50, 3, (9, 18, 27)),
        (4, 3, (1, 2, 3)),
        (2, 3, (1,)),
        (1, 3, ()),
    ],
)
def test_previews_are_evenly_spaced_and_start_early(num_steps: int, num_previews: int, steps: tuple[int, ...]) -> None:
    assert preview_steps(num_steps, num_previews) == steps


async def test_previews_approach_the_picture(checkpoint: Path) -> None:
    """Each is nearer to the result than the one before, and the last is near."""
    async with running(checkpoint) as engine:
        result, events = await draw(engine, PARAMS)
        plain, _ = await draw(engine, replace(PARAMS, num_previews=0))
    picture = result.images[0].pixels
    closeness = [psnr_db(pixels, picture) for pixels in previews_of(events)]
    assert len(closeness) == 3 and closeness == sorted(closeness)
    assert all(pixels.shape == (70, 100, 4) for pixels in previews_of(events))
    assert np.array_equal(picture, plain.images[0].pixels)  # to look at it does not change it


async def test_a_preview_is_the_clean_estimate(checkpoint: Path) -> None:
    """After the first step of a two-step schedule the estimate is x − σ·v, which is the result of a schedule that goes
    all the way in that one step."""
    async with running(checkpoint) as engine:
        _, events = await draw(engine, replace(PARAMS, num_steps=2, num_previews=1))
        one_step, _ = await draw(engine, replace(PARAMS, num_steps=1))
    [preview] = previews_of(events)
    assert psnr_db(preview, one_step.images[0].pixels) > 60


async def test_what_is_told_and_in_which_order(checkpoint: Path) -> None:
    async with running(checkpoint) as engine:
        result, events = await draw(engine, replace(PARAMS, num_images=2))
    assert isinstance(events[0], Admitted) and events[0].usage == result.usage and events[0].num_steps == 20
    for index in (0, 1):
        own = [event for event in events if not isinstance(event, Admitted) and event.image_index == index]
        kinds = [type(event) for event in own]
        assert (kinds.count(Progress), kinds.count(Preview), kinds.count(Finished)) == (20, 3, 1)
        finished = own[-1]
        assert isinstance(finished, Finished) and np.array_equal(finished.image.pixels, result.images[index].pixels)


async def test_guided_previews(checkpoint: Path) -> None:
    guided = replace(PARAMS, negative_prompt="ugly", true_cfg_scale=4.0)
    async with running(checkpoint) as engine:
        result, events = await draw(engine, guided)
    closeness = [psnr_db(pixels, result.images[0].pixels) for pixels in previews_of(events)]
    assert closeness == sorted(closeness) and closeness[-1] > closeness[0]


async def test_previews_survive_a_worker_and_come_once(checkpoint: Path) -> None:
    """The replay draws them again; whoever has seen them is not shown them again."""
    shown = asyncio.Event()
    events: list[RequestEvent] = []

    def on_event(event: RequestEvent) -> None:
        events.append(event)
        if isinstance(event, Preview):
            shown.set()

    async with running(checkpoint, worker="process") as engine:
        alone, expected = await draw(engine, replace(PARAMS, num_steps=100))
        drawing = asyncio.create_task(
            engine.generate(replace(PARAMS, num_steps=100), request_id="r", on_event=on_event)
        )
        await shown.wait()
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)
        result = await asyncio.wait_for(drawing, 90)
    assert psnr_db(result.images[0].pixels, alone.images[0].pixels) > 50
    assert sum(isinstance(event, Admitted) for event in events) == 1
    assert sum(isinstance(event, Finished) for event in events) == 1
    ours, theirs = previews_of(events), previews_of(expected)
    assert len(ours) == len(theirs) == 3
    assert all(psnr_db(one, other) > 50 for one, other in zip(ours, theirs, strict=True))
