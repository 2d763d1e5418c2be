"""Draws many prompts at once with the training forward, for measuring while the networks are on the training device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from app.evaluation.render import draw
from app.evaluation.scenes import Scene
from models.preprocess import PromptTokenizer
from models.vae import Vae
from training.encode import Statistics
from training.examples import GRID
from training.flow import Flow, row_layout
from training.forward import JointForward
from training.rows import PAD_TAILS, pad_rows, patches_of
from training.spec import NUM_STEPS, SHIFT


def sigmas(num_steps: int = NUM_STEPS, shift: float = SHIFT) -> list[float]:
    """The service's schedule for a target of the training size: evenly spaced, shifted, then 0."""
    even = [1 - step / num_steps for step in range(num_steps)]
    return [math.exp(shift) / (math.exp(shift) + 1 / sigma - 1) for sigma in even] + [0.0]


class Sampler:
    """Prompts and condition pictures to latents and to pictures, with the current weights of a training."""

    def __init__(self, flow: Flow, vae: Vae, statistics: Statistics, processor: Path, device: torch.device) -> None:
        self.flow, self.vae, self.statistics, self.device = flow, vae, statistics, device
        self.tokenizer = PromptTokenizer(processor)
        self.joints = {
            images: JointForward(flow.encoder, flow.transformer, GRID, row_layout(processor, images)).to(device)
            for images in range(len(PAD_TAILS))
        }

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], sources: Sequence[Sequence[Scene]], seed: int) -> Tensor:
        """Final latents (rows, tokens, channels); all rows have the same number of sources."""
        num_images = len(sources[0])
        joint = self.joints[num_images]
        tokenized = [self.tokenizer(prompt, [GRID] * num_images) for prompt in prompts]
        input_ids, lengths = (tensor.to(self.device) for tensor in pad_rows(tokenized, PAD_TAILS[num_images]))
        conditions, patches = [], []
        for index in range(num_images):
            latents, of_image = self._see([scenes[index] for scenes in sources], joint)
            conditions.append(latents)
            patches.append(of_image)
        noise = torch.randn(len(prompts), GRID.num_tokens, 16, generator=torch.Generator().manual_seed(seed))
        x = noise.to(self.device)
        steps = sigmas()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            embeds = joint.read(input_ids, patches)
            for sigma, following in pairwise(steps):
                at = torch.full((len(prompts),), sigma, device=self.device)
                velocity, _ = joint(embeds, lengths, conditions, x, at)
                x = x + (following - sigma) * velocity.float()
        return x

    def _see(self, scenes: Sequence[Scene], joint: JointForward) -> tuple[Tensor, Tensor]:
        rgba = torch.from_numpy(draw(scenes)).to(self.device).float()
        alpha = rgba[..., 3:] / 255
        over_white = (rgba[..., :3] * alpha + 255 * (1 - alpha)).round()
        z = self.vae.quant_conv(self.vae.encoder(rgba.permute(0, 3, 1, 2) / 127.5 - 1)).chunk(2, dim=1)[0]
        latents = (z.flatten(2).transpose(1, 2) - self.statistics.mean) / self.statistics.std
        return latents, patches_of(over_white)[:, joint.patch_order] / 127.5 - 1

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures (rows, height, width, 4) uint8 on the CPU."""
        pictures = []
        for part in latents.split(64):
            z = (
                (part * self.statistics.std + self.statistics.mean)
                .transpose(1, 2)
                .unflatten(2, (GRID.height, GRID.width))
            )
            decoded = self.vae.decoder(self.vae.post_quant_conv(z)).clamp(-1, 1)
            pictures.append(((decoded * 0.5 + 0.5) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu())
        return torch.cat(pictures)
