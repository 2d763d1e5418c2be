"""The padded training forward against the networks as they are served."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from app.evaluation.render import draw
from app.evaluation.scenes import draw_scene
from models.layout import Grid
from models.preprocess import IMAGE_SLOT, PromptTokenizer, prepare_condition_image
from models.rope import target_table
from tests.closeness import relative_error
from training.forward import JointForward, RowLayout
from training.networks import new_text_encoder, new_transformer
from training.rows import PAD_TAILS, pad_rows, patches_of

GRID = Grid(16, 16)
PROMPTS = ("make it blue", "put the object of the first on the background of image 2", "a red star")


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_training_forward_equals_prefill_and_decode(processor: Path, num_images: int) -> None:
    torch.manual_seed(num_images)
    encoder, transformer = new_text_encoder(processor).eval(), new_transformer().eval()
    torch.nn.init.normal_(transformer.proj_out.weight)
    torch.nn.init.normal_(transformer.out_scale.weight, std=0.05)
    tokenizer = PromptTokenizer(processor)
    prompts = [tokenizer(prompt, [GRID] * num_images) for prompt in PROMPTS]
    input_ids, lengths = pad_rows(prompts, PAD_TAILS[num_images])
    slot = tokenizer.special[IMAGE_SLOT]
    layout = RowLayout.of(input_ids[0].tolist(), slot, prompts[0].num_system_tokens, [GRID] * num_images)
    rng = Random(num_images)
    pictures = draw([draw_scene(rng, lambda scene: True) for _ in range(max(1, num_images))])[:num_images]
    images = [prepare_condition_image(Image.fromarray(picture), 256**2, 16) for picture in pictures]
    conditions = [torch.randn(GRID.num_tokens, 16) for _ in images]
    latents, timestep = torch.randn(3, GRID.num_tokens, 16), torch.tensor([1.0, 0.6, 0.1])

    with torch.inference_mode():
        joint = JointForward(encoder, transformer, GRID, layout)
        patches = [
            patches_of(torch.from_numpy(image.rgb)[None])[:, joint.patch_order].expand(3, -1, -1).float() / 127.5 - 1
            for image in images
        ]
        embeds = joint.read(input_ids, patches)
        velocity, _ = joint(embeds, lengths, [one.expand(3, -1, -1) for one in conditions], latents, timestep)
        for row, prompt in enumerate(prompts):
            alone = encoder.encode(prompt, images)
            assert relative_error(embeds[row, : len(alone)], alone) < 1e-4
            prefix = transformer.prefill(alone, conditions, prompt.layout)
            table = target_table(GRID, prompt.layout.target_position, transformer.config.axes_dims_rope)
            served = transformer.decode(latents[row : row + 1], timestep[row : row + 1], table[None], [prefix])
            assert relative_error(velocity[row], served[0]) < 1e-4


def test_patches_are_rows_of_pixels() -> None:
    picture = torch.from_numpy(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(1, 32, 32, 3))
    patches = patches_of(picture).reshape(1, 4, 3, 16, 16)
    assert torch.equal(patches[0, 1], picture[0, :16, 16:].permute(2, 0, 1))
