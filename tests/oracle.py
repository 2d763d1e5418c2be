"""The reference: diffusers' own `QwenImage21Pipeline`, as it loads a checkpoint folder, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLProcessor


class _StillImageProcessor(Qwen3VLProcessor):
    """The reference processor without its video half, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> None:
        pass


def reference_pipeline(folder: Path) -> QwenImage21Pipeline:
    """Only the processor is handed in, so that torchvision is not needed; with it, the folder alone is enough."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "processor")
    processor = _StillImageProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    pipeline = QwenImage21Pipeline.from_pretrained(folder, processor=processor)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def reference_picture(
    pipeline: QwenImage21Pipeline,
    prompt: str,
    *,
    seed: int,
    num_steps: int,
    images: Sequence[Image.Image] = (),
    size_px: tuple[int, int] | None = None,
    negative_prompt: str | None = None,
    true_cfg_scale: float = 1.0,
    resolution_px: int = 256,
) -> np.ndarray:
    """The reference's picture, (height, width, 4) uint8."""
    width, height = size_px or (None, None)
    picture = pipeline(
        prompt,
        image=list(images) or None,
        negative_prompt=negative_prompt,
        true_cfg_scale=true_cfg_scale,
        width=width,
        height=height,
        num_inference_steps=num_steps,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_resolution=resolution_px,
    ).images[0]
    return np.asarray(picture)


def psnr_db(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures; infinite when they are equal."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    error = np.mean((ours.astype(np.float64) - theirs.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
