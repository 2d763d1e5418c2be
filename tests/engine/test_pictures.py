"""Whole pictures through the engine against the reference pipeline: at least 50 dB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diffusers import QwenImage21Pipeline

from engine.request import GenerationParams
from models.folder import embedded_checkpoint
from tests.engine.conftest import running
from tests.oracle import psnr_db, reference_picture, reference_pipeline
from tests.pictures import photo

MIN_PSNR_DB = 50

CASES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "a red circle", "size_px": (256, 256)},
    "guided": {
        "prompt": "a red circle",
        "negative_prompt": "a blue square",
        "true_cfg_scale": 4.0,
        "size_px": (128, 128),
    },
    "empty negative": {"prompt": "a star", "negative_prompt": "", "true_cfg_scale": 2.5, "size_px": (128, 128)},
    "one image": {"prompt": "make it blue", "images": [photo("RGB")]},
    "three images": {
        "prompt": "combine them",
        "images": [photo("RGB", (300, 200)), photo("RGBA", (150, 210)), photo("L", (80, 80))],
    },
    "four images, guided": {
        "prompt": "combine them",
        "negative_prompt": "blurry",
        "true_cfg_scale": 4.0,
        "images": [photo("P", (120, 90)), photo("RGBA", (64, 200)), photo("RGB", (99, 101)), photo("L", (640, 320))],
        "size_px": (96, 160),
    },
    "non-square": {"prompt": "a wide picture", "size_px": (320, 96)},
    "non-ASCII": {"prompt": "красный круг 赤い丸 🔴", "size_px": (128, 160)},
    "empty prompt": {"prompt": "", "size_px": (64, 64)},
}


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, Path]) -> dict[str, QwenImage21Pipeline]:
    return {name: reference_pipeline(folder) for name, folder in checkpoints.items()}


async def compare(folder: Path, reference: QwenImage21Pipeline, case: dict[str, Any]) -> None:
    images = case.get("images", [])
    settings = {key: value for key, value in case.items() if key not in ("images", "prompt")}
    theirs = reference_picture(
        reference, case["prompt"], seed=11, num_steps=4, images=images, resolution_px=128, **settings
    )
    params = GenerationParams(
        prompt=case["prompt"],
        seed=11,
        num_steps=4,
        condition_images=tuple(image.convert("RGBA") for image in images),
        resolution_px=128,
        **settings,
    )
    async with running(folder) as engine:
        result = await engine.generate(params, request_id="r")
    assert psnr_db(result.images[0].pixels, theirs) >= MIN_PSNR_DB
    assert theirs.std() > 20, "a flat picture would prove nothing"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", ["first", "second"])
async def test_pictures_equal_the_reference(
    checkpoints: dict[str, Path], references: dict[str, QwenImage21Pipeline], name: str, case: dict[str, Any]
) -> None:
    await compare(checkpoints[name], references[name], case)


@pytest.mark.parametrize("name", ["turbo", "uncached"])
@pytest.mark.parametrize("case", ["text", "guided", "three images"])
async def test_other_kinds_of_checkpoint_equal_the_reference(
    checkpoints: dict[str, Path], references: dict[str, QwenImage21Pipeline], name: str, case: str
) -> None:
    await compare(checkpoints[name], references[name], CASES[case])


@pytest.mark.parametrize("case", ["text", "guided", "one image", "three images"])
async def test_the_embedded_checkpoint_equals_the_reference(case: str) -> None:
    """Its folder as it is: what is served by default is what diffusers draws from it."""
    folder = embedded_checkpoint()
    await compare(folder, reference_pipeline(folder), CASES[case])
