"""Pictures for the autoencoder: scenes with every number drawn freely, piles of shapes, and photographs.

Everything is drawn on the device with one generator. Scenes follow the world that is evaluated, but their shapes also
turn and their colours vary; piles of many small shapes are rich in edges; photographs come from scikit-image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from skimage import data
from torch import Tensor

from app.evaluation.render import SceneBatch, render
from app.evaluation.scenes import BACKGROUNDS, COLOURS, SHAPES
from training.spec import RESOLUTION_PX

PHOTOS = ("astronaut", "immunohistochemistry", "hubble_deep_field", "retina", "colorwheel", "camera", "brick", "grass",
          "gravel", "coins", "moon", "page", "text")  # fmt: skip
HELD_OUT_PHOTOS = ("chelsea", "coffee", "rocket")
PHOTO_SIDE_PX = 512


def load_photos(names: tuple[str, ...] = PHOTOS) -> Tensor:
    """Square photographs, (photos, 3, side, side) in [0, 1]."""
    return torch.stack([_square(getattr(data, name)(), PHOTO_SIDE_PX) for name in names])


def held_out_photos() -> Tensor:
    """(photos, 4, side, side) in [0, 1], opaque, at the checkpoint's own size."""
    rgb = torch.stack([_square(getattr(data, name)(), RESOLUTION_PX) for name in HELD_OUT_PHOTOS])
    return torch.cat([rgb, torch.ones_like(rgb[:, :1])], dim=1)


def _square(array: np.ndarray, side_px: int) -> Tensor:
    picture = Image.fromarray(array).convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    resized = picture.resize((side_px, side_px), Image.Resampling.LANCZOS, box=(left, top, left + side, top + side))
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255


@dataclass
class PictureSource:
    """Batches of (rows, 4, side, side) pictures in [0, 1]."""

    device: torch.device
    photos: Tensor
    generator: torch.Generator
    side_px: int = RESOLUTION_PX

    def __post_init__(self) -> None:
        self.palette = torch.tensor(list(COLOURS.values()), device=self.device).float() / 255
        self.render = render

    def compile(self) -> None:
        self.render = torch.compile(render, dynamic=False)

    def _uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low

    def _choice(self, count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=self.generator, device=self.device)

    def scenes(self, rows: int, things: int, low: float, high: float) -> SceneBatch:
        """Random scenes of up to `things` things with radii in [low, high]; nothing is kept from overlapping."""
        upright = self._uniform(rows, 1) < 0.6
        angle = torch.where(upright, 0.0, self._uniform(rows, things, high=6.2832))
        palette = self.palette[self._choice(len(self.palette), rows, things + 2)]
        free = self._uniform(rows, things + 2, 3)
        colours = torch.where(self._uniform(rows, 1, 1) < 0.75, palette, free)
        radius = self._uniform(rows, things, low=low, high=high)
        present = self._uniform(rows, things) < 0.7
        present[:, 0] = True
        return SceneBatch(
            shape=self._choice(len(SHAPES), rows, things),
            colour=colours[:, :things],
            centre=self._uniform(rows, things, 2, low=-0.8, high=0.8),
            radius=radius * present,
            angle=angle,
            kind=self._choice(len(BACKGROUNDS), rows),
            ground=torch.where(
                (self._uniform(rows, 1, 1) < 0.3), torch.ones_like(colours[:, things:]), colours[:, things:]
            ),
        )

    def of_photos(self, rows: int) -> Tensor:
        """Random crops, mirrored and tinted; one in four has a shape cut out of it."""
        scale = self._uniform(rows, low=0.35, high=1.0)
        shift = (1 - scale)[:, None] * self._uniform(rows, 2, low=-1.0, high=1.0)
        mirror = torch.where(self._uniform(rows) < 0.5, -1.0, 1.0)
        affine = torch.zeros(rows, 2, 3, device=self.device)
        affine[:, 0, 0], affine[:, 1, 1] = scale * mirror, scale
        affine[:, :, 2] = shift
        grid = F.affine_grid(affine, [rows, 3, self.side_px, self.side_px], align_corners=False)
        crops = F.grid_sample(self.photos[self._choice(len(self.photos), rows)], grid, align_corners=False,
                              padding_mode="reflection")  # fmt: skip
        tint = self._uniform(rows, 3, 1, 1, low=0.75, high=1.15)
        crops = (crops * tint).clamp(0, 1)
        holes = render(self.scenes(rows, 1, 0.4, 0.9), self.side_px, self.side_px)[:, 3:]
        alpha = torch.where(self._uniform(rows, 1, 1, 1) < 0.25, holes, torch.ones_like(holes))
        return torch.cat([crops, alpha], dim=1)

    def batch(self, rows: int) -> Tensor:
        """Half scenes, a third piles, the rest photographs."""
        piles, photos = rows // 3, max(1, rows // 6)
        side = self.side_px
        parts = [
            self.render(self.scenes(rows - piles - photos, 3, 0.2, 0.55), side, side),
            self.render(self.scenes(piles, 8, 0.08, 0.6), side, side),
            self.of_photos(photos),
        ]
        return torch.cat(parts)
