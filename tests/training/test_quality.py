"""The shipped checkpoint draws what it is asked for: held-out prompts through the real engine, judged by analysis.

Thresholds leave room for one miss; the figures of full runs are in the checkpoint's own README.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from app.evaluation.run import draw_case
from app.evaluation.suite import Case, Judged, edit_cases, judge, scene_cases
from engine.config import EngineConfig
from engine.engine import Engine
from models.folder import embedded_checkpoint
from training.reconstruction import measure

SCENES, EDITS = 12, ("recolour", "replace", "move", "cut out", "background", "resize")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(EngineConfig(model=str(embedded_checkpoint()), device="cpu", dtype="float32", worker="inline"))
    await engine.start()
    yield engine
    await engine.stop(0)


async def drawn_and_judged(engine: Engine, cases: Sequence[Case]) -> list[Judged]:
    pictures = await asyncio.gather(*(draw_case(engine, case, str(number)) for number, case in enumerate(cases)))
    return [judge(case, picture) for case, picture in zip(cases, pictures, strict=True)]


async def test_draws_held_out_prompts(engine: Engine) -> None:
    judged = await drawn_and_judged(engine, scene_cases(SCENES))
    for attribute in ("colour", "shape", "position", "background", "alpha"):
        wrong = [one.case.prompt for one in judged if not one.verdict[attribute]]
        assert len(wrong) <= 1, (attribute, wrong)
    assert sum(all(one.verdict.values()) for one in judged) >= SCENES - 2
    widths = [width for one in judged for width in one.edge_px]
    assert sum(widths) / len(widths) < 2.5


async def test_obeys_edits_and_keeps_the_rest(engine: Engine) -> None:
    cases = [case for case in edit_cases(27) if case.edit is not None and case.edit.kind in EDITS][: len(EDITS)]
    judged = await drawn_and_judged(engine, cases)
    assert sum(all(one.verdict.values()) for one in judged) >= len(EDITS) - 2, [
        (one.case.prompt, one.verdict) for one in judged
    ]


def test_pictures_come_back_from_the_autoencoder() -> None:
    found = measure(embedded_checkpoint(), num_scenes=6)
    assert found.scenes_mean_db >= 35
    assert min(found.photos_db.values()) >= 24
