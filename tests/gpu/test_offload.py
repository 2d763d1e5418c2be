"""Offload on a GPU: pictures equal bit for bit, captured steps that survive turns, and memory that is given back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.loading import load_preparer, load_runner, model_card, read_configs
from engine.request import GenerationParams
from engine.work import DecodeImage, DenoiseStep, EncodePrompt, Prefill, Sample
from models.folder import embedded_checkpoint
from models.precision import AS_STORED, Precision
from tests.pictures import photo

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FP8 = Precision(transformer="fp8", text_encoder="fp8", first_steps=1)


def pictures(config: EngineConfig) -> tuple[list[Tensor], set[str]]:
    """Three requests whose steps alternate with other networks' turns, and how their steps ran."""
    configs = read_configs(config)
    preparer, runner = load_preparer(configs, model_card(config, configs)), load_runner(config)
    drawn, ran = [], set()
    for number, prompt in enumerate(("a red circle", "a blue star on a white background", "a green ring")):
        images = (photo("RGBA", (128, 128)),) if number == 2 else ()
        params = GenerationParams(prompt, seed=number, size_px=(256, 256), num_steps=4, condition_images=images)
        request = preparer.prepare(params, str(number), 0.0).request
        runner.add(request)
        runner.run(EncodePrompt(str(number)))
        runner.run(Prefill(str(number)))
        for step in range(4):
            runner.run(DenoiseStep(request.batch_key, (Sample(str(number), 0, step),)))
            ran.add(runner.shortcut)
            if step == 1:
                runner.run(DecodeImage(str(number), 0))
        picture = runner.run(DecodeImage(str(number), 0))
        assert picture is not None
        drawn.append(torch.from_numpy(picture))
        runner.remove(str(number))
    return drawn, ran


@pytest.mark.parametrize("precision", [AS_STORED, FP8], ids=["bf16", "fp8"])
def test_offloaded_pictures_equal_resident_ones(precision: Precision) -> None:
    config = EngineConfig(model=str(embedded_checkpoint()), device="cuda", precision=precision)
    resident, _ = pictures(config)
    for mode in ("component", "block"):
        offloaded, ran = pictures(replace(config, offload=mode))
        assert "hit" in ran, "captured steps are replayed"
        assert all(map(torch.equal, resident, offloaded)), mode


def test_memory_is_unpinned_and_freed() -> None:
    config = EngineConfig(model=str(embedded_checkpoint()), device="cuda", offload="block")
    for _ in range(3):  # memory that were still registered could not be registered again
        load_runner(config)
