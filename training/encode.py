"""Turns examples into what the transformer trains on, once: normalised latents, patches of the sources, token labels.

Encoding inside the training loop would take most of its time; 400,000 pictures take well under a minute beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from app.evaluation.render import SceneBatch, outlines_px, render
from app.evaluation.scenes import COLOURS, SHAPES
from models.vae import Vae
from training.examples import Examples
from training.rows import patches_of
from training.spec import PATCH_PX, RESOLUTION_PX

COVERED = 0.25  # part of a token that a thing must cover to name it
TOUCHED = 0.004  # part that makes the token matter more


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of one kind on the device. `latents` (rows, images + 1, tokens, channels) bfloat16, sources first;
    `patches` (rows, images, patches, 3 × side²) uint8; `token_shape` and `token_colour` (rows, tokens) name the
    target's things (0 is background); `touched` marks tokens where a thing is or was."""

    examples: Examples
    latents: Tensor
    patches: Tensor
    token_shape: Tensor
    token_colour: Tensor
    touched: Tensor

    def __len__(self) -> int:
        return len(self.latents)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and standard deviation of every latent channel."""

    mean: Tensor
    std: Tensor


class SceneEncoder:
    """Renders and encodes batches of scenes with a trained autoencoder."""

    def __init__(self, vae: Vae, device: torch.device, rows: int = 512, *, compiled: bool = True) -> None:
        self.device, self.rows, self.compiled = device, rows, compiled
        self.vae = vae.to(device, memory_format=torch.channels_last).eval()
        self._draw = torch.compile(_draw, dynamic=False) if compiled else _draw
        self._encode = torch.compile(self._latents, dynamic=False) if compiled else self._latents

    def _latents(self, pictures: Tensor) -> Tensor:
        z = self.vae.quant_conv(self.vae.encoder(pictures)).chunk(2, dim=1)[0]
        return z.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def raw(self, scenes: SceneBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Of any number of scenes: the autoencoder's latents, every thing's cover of every token, RGB over white."""
        latents, covers, colours = [], [], []
        for start in range(0, len(scenes), self.rows):
            part = scenes[start : start + self.rows].to(self.device)
            count = len(part)
            if self.compiled and count < self.rows:  # one shape for the compiled code
                part = part[torch.arange(self.rows, device=self.device) % count]
            pictures, cover, over_white = self._draw(part)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                z = self._encode((pictures * 2 - 1).contiguous(memory_format=torch.channels_last))
            latents.append(z[:count].float())
            covers.append(cover[:count])
            colours.append(over_white[:count])
        return torch.cat(latents), torch.cat(covers), torch.cat(colours)

    def statistics(self, scenes: SceneBatch) -> Statistics:
        std, mean = torch.std_mean(self.raw(scenes)[0], dim=(0, 1))
        return Statistics(mean, std)

    @torch.no_grad()
    def encode(self, examples: Examples, statistics: Statistics, chunk: int = 8192) -> Encoded:
        group = len(examples.scenes) // len(examples)  # sources and target
        latents, patches, shapes, colours, touched = [], [], [], [], []
        for start in range(0, len(examples), chunk):
            end = min(start + chunk, len(examples))
            scenes = examples.scenes[start * group : end * group].to(self.device)
            raw, cover, over_white = self.raw(scenes)
            normal = ((raw - statistics.mean) / statistics.std).to(torch.bfloat16)
            latents.append(normal.unflatten(0, (-1, group)))
            pixels = over_white.unflatten(0, (-1, group))[:, :-1].flatten(0, 1)
            patches.append(patches_of(pixels.permute(0, 2, 3, 1)).unflatten(0, (end - start, group - 1)))
            part, index = cover.unflatten(0, (-1, group))[:, -1].max(dim=1)
            chosen = scenes.shape.unflatten(0, (-1, group))[:, -1].gather(1, index.flatten(1)) + 1
            named = part.flatten(1) > COVERED
            shapes.append((chosen * named).to(torch.uint8))
            hue = _colour_index(scenes).unflatten(0, (-1, group))[:, -1]
            colours.append((hue.gather(1, index.flatten(1)) * named).to(torch.uint8))
            base = examples.base[start:end].to(self.device)[:, None, None, None, None].expand(-1, 1, *cover.shape[1:])
            both = cover.unflatten(0, (-1, group))
            there = torch.maximum(both[:, -1], both.gather(1, base)[:, 0]).amax(dim=1)
            touched.append(there.flatten(1) > TOUCHED)
        return Encoded(examples, *(torch.cat(parts) for parts in (latents, patches, shapes, colours, touched)))


def _draw(scenes: SceneBatch) -> tuple[Tensor, Tensor, Tensor]:
    pictures = render(scenes, RESOLUTION_PX, RESOLUTION_PX)
    fields = torch.stack(outlines_px(scenes, RESOLUTION_PX, RESOLUTION_PX), dim=1)
    cover = F.avg_pool2d((0.5 - fields).clamp(0, 1), PATCH_PX)
    alpha = pictures[:, 3:]
    over_white = (pictures[:, :3] * alpha + 1 - alpha) * 255
    return pictures, cover, over_white.round().to(torch.uint8)


def _colour_index(scenes: SceneBatch) -> Tensor:
    """The number of every thing's colour, from 1: (rows, things)."""
    palette = torch.tensor(list(COLOURS.values()), device=scenes.colour.device).float() / 255
    return (scenes.colour[:, :, None] - palette).square().sum(-1).argmin(-1) + 1


TOKEN_LABELS = (len(SHAPES) + 1, len(COLOURS) + 1)
