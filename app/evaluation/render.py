"""Draws scenes: signed distance functions, anti-aliased over one pixel, on whatever device the batch is.

Distances are exact near an outline, so coverage is right there. Behind a transparent background the colour channels
carry on a few pixels past the outline and then fade to white: a half-covered pixel keeps the thing's own colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from app.evaluation.scenes import BACKGROUNDS, COLOURS, SHAPES, Scene

CHECKER_CELLS = 8  # cells along the shorter side
BLEED_PX = 4.0
TRANSPARENT = BACKGROUNDS.index("transparent")


@dataclass(frozen=True, slots=True)
class SceneBatch:
    """Scenes as tensors. Colours are in [0, 1]; a radius of 0 marks a thing that is not there."""

    shape: Tensor  # (rows, things) int64
    colour: Tensor  # (rows, things, 3)
    centre: Tensor  # (rows, things, 2): x, y
    radius: Tensor  # (rows, things)
    angle: Tensor  # (rows, things), radians
    kind: Tensor  # (rows,) int64, an index of BACKGROUNDS
    ground: Tensor  # (rows, 2, 3)

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, rows: slice | Tensor) -> SceneBatch:
        return SceneBatch(*(getattr(self, name)[rows] for name in SceneBatch.__slots__))

    def to(self, device: torch.device | str) -> Self:
        return type(self)(*(getattr(self, name).to(device) for name in SceneBatch.__slots__))

    @classmethod
    def of(cls, scenes: Sequence[Scene]) -> Self:
        """Pack scenes; there are as many places for things as the fullest scene needs."""
        rows, things = len(scenes), max(len(scene.things) for scene in scenes)
        shape = np.zeros((rows, things), np.int64)
        colour, centre = np.zeros((rows, things, 3), np.float32), np.zeros((rows, things, 2), np.float32)
        radius, kind = np.zeros((rows, things), np.float32), np.zeros(rows, np.int64)
        ground = np.ones((rows, 2, 3), np.float32)
        for row, scene in enumerate(scenes):
            for index, thing in enumerate(scene.things):
                shape[row, index] = SHAPES.index(thing.shape)
                colour[row, index] = np.array(COLOURS[thing.colour]) / 255
                centre[row, index], radius[row, index] = thing.centre, thing.radius
            kind[row] = BACKGROUNDS.index(scene.background.kind)
            for index, name in enumerate(scene.background.colours):
                ground[row, index] = np.array(COLOURS[name]) / 255
        tensors = (torch.from_numpy(array) for array in (shape, colour, centre, radius, radius * 0, kind, ground))
        return cls(*tensors)


def _star(x: Tensor, y: Tensor) -> Tensor:
    """Five points, one of them up; after Inigo Quilez's two-dimensional distance functions, as is the heart."""
    x, y = x.abs(), 0.09 - y
    for kx, ky in ((0.809017, -0.587785), (-0.809017, -0.587785)):
        along = 2 * (kx * x + ky * y).clamp(min=0)
        x, y = x - along * kx, y - along * ky
    x, y = x.abs(), y - 1.0
    bx, by = 0.46 * 0.587785, 0.46 * 0.809017 - 1.0
    part = ((x * bx + y * by) / (bx * bx + by * by)).clamp(0, 1)
    distance = ((x - bx * part) ** 2 + (y - by * part) ** 2).add(1e-12).sqrt()
    return torch.where(y * bx - x * by < 0, -distance, distance)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    scale = 1.6
    x, y = x.abs() / scale, 0.55 - y / scale
    lobe = ((x - 0.25) ** 2 + (y - 0.75) ** 2).add(1e-12).sqrt() - 0.353553
    foot = 0.5 * (x + y).clamp(min=0)
    sides = torch.minimum(x**2 + (y - 1) ** 2, (x - foot) ** 2 + (y - foot) ** 2).add(1e-12).sqrt()
    sides = torch.where(x < y, -sides, sides)
    return scale * torch.where(x + y > 1, lobe, sides)


def _bar(x: Tensor, y: Tensor, half_width: float, half_height: float) -> Tensor:
    return torch.maximum(x.abs() - half_width, y.abs() - half_height)


def distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Signed distance (inside below 0) to the outline of `shape`, in units of its radius; all broadcast together."""
    length = (x**2 + y**2).add(1e-12).sqrt()
    outlines: dict[str, Tensor] = {
        "circle": length - 0.9,
        "square": _bar(x, y, 0.8, 0.8),
        "triangle": torch.maximum(y - 0.8, (x.abs() * 1.6 - (y + 0.8) * 0.92) / 1.8457),
        "star": _star(x, y),
        "ring": (length - 0.68).abs() - 0.22,
        "cross": torch.minimum(_bar(x, y, 0.9, 0.3), _bar(x, y, 0.3, 0.9)),
        "heart": _heart(x, y),
        "diamond": (x.abs() / 0.72 + y.abs() / 0.98 - 1) / (0.72**-2 + 0.98**-2) ** 0.5,
    }
    chosen = outlines[SHAPES[0]]
    for index, name in enumerate(SHAPES[1:], start=1):
        chosen = torch.where(shape == index, outlines[name], chosen)
    return chosen


def _axes(batch: SceneBatch, width_px: int, height_px: int) -> tuple[Tensor, Tensor, float]:
    device = batch.radius.device
    x = torch.arange(width_px, device=device, dtype=torch.float32) + 0.5
    y = torch.arange(height_px, device=device, dtype=torch.float32) + 0.5
    return x[None, None, :], y[None, :, None], min(width_px, height_px) / 2


def outlines_px(batch: SceneBatch, width_px: int, height_px: int) -> list[Tensor]:
    """Signed distance of every pixel to every thing, in pixels: one (rows, height, width) a thing."""
    x, y, half_px = _axes(batch, width_px, height_px)
    fields = []
    for index in range(batch.shape.shape[1]):
        at = (slice(None), index, None, None)
        radius_px = batch.radius[at] * half_px
        dx = x - (batch.centre[..., 0][at] + 1) * (width_px / 2)
        dy = y - (batch.centre[..., 1][at] + 1) * (height_px / 2)
        cos, sin = batch.angle[at].cos(), batch.angle[at].sin()
        scale = radius_px.clamp(min=1e-3)
        field = distance(batch.shape[at], (dx * cos + dy * sin) / scale, (dy * cos - dx * sin) / scale) * scale
        fields.append(torch.where(radius_px > 0, field, 1e4))
    return fields


def _ground(batch: SceneBatch, width_px: int, height_px: int) -> Tensor:
    x, y, half_px = _axes(batch, width_px, height_px)
    cell = 2 * half_px / CHECKER_CELLS
    parity = ((x / cell).floor() + (y / cell).floor()) % 2
    kind = batch.kind[:, None, None]
    part = torch.where(kind == BACKGROUNDS.index("vertical"), y / height_px, x / width_px)
    part = torch.where(kind == BACKGROUNDS.index("checkered"), parity, part)
    part = torch.where((kind == 0) | (kind == TRANSPARENT), 0.0, part).unsqueeze(1)
    first, second = batch.ground[:, 0, :, None, None], batch.ground[:, 1, :, None, None]
    ground: Tensor = first + (second - first) * part
    return ground


def render(batch: SceneBatch, width_px: int, height_px: int) -> Tensor:
    """RGBA pictures, (rows, 4, height, width) in [0, 1], alpha not premultiplied."""
    rgb = _ground(batch, width_px, height_px)
    is_clear = (batch.kind == TRANSPARENT)[:, None, None]
    alpha = torch.where(is_clear, 0.0, torch.ones_like(rgb[:, 0]))
    for index, field in enumerate(outlines_px(batch, width_px, height_px)):
        cover = (0.5 - field).clamp(0, 1)
        tint = torch.where(is_clear, (1 - (field - 1) / BLEED_PX).clamp(0, 1), cover).unsqueeze(1)
        rgb = rgb + (batch.colour[:, index, :, None, None] - rgb) * tint
        alpha = alpha + (1 - alpha) * cover
    return torch.cat([rgb, alpha.unsqueeze(1)], dim=1)


def draw(scenes: Sequence[Scene], width_px: int = 256, height_px: int = 256) -> np.ndarray:
    """Pictures of scenes as (rows, height, width, 4) uint8; one after the other, which is faster on a CPU."""
    pictures = np.empty((len(scenes), height_px, width_px, 4), np.uint8)
    with torch.inference_mode():
        for row, scene in enumerate(scenes):
            picture = render(SceneBatch.of([scene]), width_px, height_px)[0]
            pictures[row] = (picture * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return pictures
