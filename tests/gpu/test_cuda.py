"""The foundation on a GPU: bfloat16 predictions, whole pictures, batches. Skipped where there is none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Transformer2DModel

from engine.request import GenerationParams
from models.config import CheckpointConfigs
from models.image_model import ImageModel
from models.layout import Grid, prefix_layout
from models.rope import target_table
from tests.closeness import relative_error
from tests.engine.conftest import running
from tests.oracle import psnr_db
from tests.pictures import photo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TARGET = Grid(8, 8)
PARAMS = GenerationParams("a red circle", seed=1, size_px=(128, 128), num_steps=4)


def predictions(folder: Path, device: str, dtype: torch.dtype, text_len: int) -> torch.Tensor:
    """Our velocity of one text-to-image row at t = 0.6, on the CPU in float32."""
    model = ImageModel.load(CheckpointConfigs.read(folder), torch.device(device), dtype)
    config = model.transformer.config
    draw = torch.Generator().manual_seed(3)
    embeds = torch.randn(text_len, config.context_in_dim, generator=draw).to(device, dtype)
    latents = torch.randn(1, TARGET.num_tokens, config.in_channels, generator=draw).to(device, dtype)
    layout = prefix_layout([False] * text_len, [])
    rotary = target_table(TARGET, layout.target_position, config.axes_dims_rope).to(device).unsqueeze(0)
    with torch.inference_mode():
        prefix = model.transformer.prefill(embeds, [], layout)
        timestep = torch.tensor([0.6], device=device)
        return model.transformer.decode(latents, timestep, rotary, [prefix]).float().cpu()


def reference_predictions(folder: Path, device: str, dtype: torch.dtype, text_len: int) -> torch.Tensor:
    transformer = QwenImage21Transformer2DModel.from_pretrained(folder / "transformer").to(device, dtype)
    draw = torch.Generator().manual_seed(3)
    embeds = torch.randn(text_len, transformer.config.context_in_dim, generator=draw).to(device, dtype)
    latents = torch.randn(1, TARGET.num_tokens, transformer.config.in_channels, generator=draw).to(device, dtype)
    with torch.inference_mode():
        out = transformer(
            hidden_states=latents,
            timestep=torch.tensor([0.6], device=device, dtype=dtype),
            encoder_hidden_states=embeds[None],
            img_shapes=[[(1, TARGET.height, TARGET.width)]],
            img_mask=torch.tensor([[False] * text_len + [True] * TARGET.num_slots], device=device),
            return_dict=False,
        )[0]
    return out[:, -TARGET.num_tokens :].float().cpu()


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("text_len", [5, 130])
def test_bfloat16_error_is_no_worse_than_the_reference(checkpoints: dict[str, Path], name: str, text_len: int) -> None:
    exact = reference_predictions(checkpoints[name], "cpu", torch.float32, text_len)
    theirs = relative_error(reference_predictions(checkpoints[name], "cuda", torch.bfloat16, text_len), exact)
    ours = relative_error(predictions(checkpoints[name], "cuda", torch.bfloat16, text_len), exact)
    assert ours <= 1.5 * theirs, (ours, theirs)
    assert relative_error(predictions(checkpoints[name], "cuda", torch.float32, text_len), exact) < 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pictures_through_the_engine(checkpoint: Path, dtype: str) -> None:
    images = (photo("RGB", (120, 90)).convert("RGBA"), photo("RGBA", (64, 100)))

    async def draw(device: str) -> list[np.ndarray]:
        params = [
            PARAMS,
            replace(PARAMS, negative_prompt="", true_cfg_scale=3.0),
            replace(PARAMS, condition_images=images, resolution_px=128),
        ]
        async with running(checkpoint, device=device, dtype=dtype) as engine:
            alone = [await engine.generate(one, request_id="a") for one in params]
            again = [await engine.generate(one, request_id="b") for one in params]
            batch = await asyncio.gather(*(engine.generate(params[0], request_id=f"c{i}") for i in range(4)))
        for first, second in zip(alone, again, strict=True):
            assert psnr_db(first.images[0].pixels, second.images[0].pixels) == float("inf")
        for result in batch:
            assert psnr_db(result.images[0].pixels, alone[0].images[0].pixels) > (50 if dtype == "float32" else 20)
        return [result.images[0].pixels for result in alone]

    on_gpu, on_cpu = asyncio.run(draw("cuda")), asyncio.run(draw("cpu"))
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert psnr_db(ours, theirs) > (40 if dtype == "float32" else 15)
