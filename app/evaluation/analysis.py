"""Says what a picture shows, by plain image analysis: no network, and no knowledge of what was asked for.

The frame of a picture gives the background; what differs from it falls into connected regions; a region's outline,
scaled to a square, is compared with every shape's, its middle colour with every named colour. Sizes are in pixels,
centres in the units of scenes: from -1 (left, top) to 1 (right, bottom).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from app.evaluation.regions import box_mean, connected_regions, dilate, erode
from app.evaluation.render import CHECKER_CELLS, draw
from app.evaluation.scenes import COLOURS, SHAPES, Background, Scene, Thing

UNKNOWN = "unknown"
TEMPLATE_SIDE = 64
MIN_OVERLAP = 0.8  # intersection over union with the best shape's outline
MIN_AREA_PART = 0.003  # of the picture; less is a speck
MAX_COLOUR_DISTANCE = 60.0
BACKGROUND_DISTANCE = 30.0  # how far a background pixel may be from the fitted background
THING_DISTANCE = 42.0
ASPECT_TOLERANCE = 0.2  # of the logarithm of width / height
EDGE_BAND_PX = 6


@dataclass(frozen=True, slots=True)
class FoundThing:
    """A region. `overlap` is that of the best shape; `edge_px` the mean width of the transition from 10 to 90 %."""

    shape: str
    colour: str
    centre: tuple[float, float]
    radius: float
    overlap: float
    edge_px: float


@dataclass(frozen=True, slots=True)
class Finding:
    """`clean` is the part of the background that is where the fit says, `alpha_outside` and `alpha_inside` the mean
    alpha, in [0, 1], away from all things and well inside them."""

    background: Background
    things: tuple[FoundThing, ...]
    clean: float
    alpha_outside: float
    alpha_inside: float


def analyse(picture: np.ndarray) -> Finding:
    """What an RGBA picture (height, width, 4) uint8 shows."""
    rgb, alpha = picture[..., :3].astype(np.float32), picture[..., 3].astype(np.float32) / 255
    frame = _frame(alpha.shape)
    if float(np.median(alpha[frame])) < 0.25:
        background, behind = Background("transparent"), None
        mask = alpha > 0.5
    else:
        background, behind = fit_background(rgb, frame)
        mask = np.linalg.norm(rgb - behind, axis=-1) > THING_DISTANCE
        if background.kind == "checkered":  # seams between cells are no things
            mask = box_mean(mask, 3) > 0.5
    regions = connected_regions(mask, round(MIN_AREA_PART * mask.size))
    outside, inside = np.ones(mask.shape, bool), np.zeros(mask.shape, bool)
    things = []
    for region in regions:
        core = erode(region, 3)
        core = core if core.any() else region
        things.append(_describe(region, core, rgb, alpha, behind))
        outside &= ~dilate(region, 5)
        inside |= core
    if behind is None:
        clean = 1.0
    else:
        near = np.linalg.norm(rgb - behind, axis=-1) < BACKGROUND_DISTANCE
        clean = float(near[outside].mean()) if outside.any() else 0.0
    return Finding(
        background,
        tuple(sorted(things, key=lambda thing: thing.centre)),
        clean,
        float(alpha[outside].mean()) if outside.any() else 0.0,
        float(alpha[inside].mean()) if inside.any() else 0.0,
    )


def nearest_colour(rgb: np.ndarray) -> str:
    """The named colour of an RGB triple in [0, 255]."""
    distances = {name: float(np.linalg.norm(rgb - np.array(value))) for name, value in COLOURS.items()}
    name = min(distances, key=lambda colour: distances[colour])
    return name if distances[name] < MAX_COLOUR_DISTANCE else UNKNOWN


def fit_background(rgb: np.ndarray, frame: np.ndarray) -> tuple[Background, np.ndarray]:
    """The kind of background that explains most of the frame, and that background without the things."""
    height, width, _ = rgb.shape
    rows, columns = np.mgrid[0:height, 0:width]
    cell = min(height, width) / CHECKER_CELLS
    parity = ((rows // cell + columns // cell) % 2).astype(np.float32)
    coordinates = {"vertical": (rows + 0.5) / height, "horizontal": (columns + 0.5) / width, "checkered": parity}
    middle = np.median(rgb[frame], axis=0)
    best, best_part = "plain", float((np.linalg.norm(rgb[frame] - middle, axis=-1) < 20).mean()) + 0.05
    ends: tuple[np.ndarray, ...] = (middle,)
    behind = np.broadcast_to(middle, rgb.shape)
    for kind, coordinate in coordinates.items():
        first, last = _fit_ends(coordinate[frame], rgb[frame], robust_steps=kind == "checkered")
        fitted = first + (last - first) * coordinate[..., None]
        part = float((np.linalg.norm((rgb - fitted)[frame], axis=-1) < 20).mean())
        if part > best_part and np.linalg.norm(last - first) > 40:
            best, best_part, behind, ends = kind, part, fitted, (first, last)
    return Background(best, tuple(nearest_colour(end) for end in ends)), behind


def _fit_ends(part: np.ndarray, rgb: np.ndarray, *, robust_steps: bool) -> tuple[np.ndarray, np.ndarray]:
    """Colours at 0 and 1 of a background that runs along `part`; outliers are left out of a second fit."""
    if robust_steps:
        return np.median(rgb[part < 0.5], axis=0), np.median(rgb[part >= 0.5], axis=0)
    kept = np.ones(len(part), bool)
    for _ in range(3):
        design = np.stack([1 - part[kept], part[kept]], axis=1)
        ends = np.linalg.lstsq(design, rgb[kept], rcond=None)[0]
        residual = np.linalg.norm(rgb - np.stack([1 - part, part], axis=1) @ ends, axis=-1)
        kept = residual <= max(10.0, float(np.median(residual)) * 2.5)
    return ends[0], ends[1]


def _frame(shape: tuple[int, ...]) -> np.ndarray:
    frame = np.ones(shape, bool)
    depth = max(4, min(shape) // 32)
    frame[depth:-depth, depth:-depth] = False
    return frame


def _describe(
    region: np.ndarray, core: np.ndarray, rgb: np.ndarray, alpha: np.ndarray, behind: np.ndarray | None
) -> FoundThing:
    height, width = region.shape
    rows, columns = np.flatnonzero(region.any(axis=1)), np.flatnonzero(region.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    box = Image.fromarray(region[top:bottom, left:right].astype(np.uint8) * 255)
    outline = np.asarray(box.resize((TEMPLATE_SIDE, TEMPLATE_SIDE), Image.Resampling.BILINEAR)) > 127
    overlaps = {}
    for shape, (template, box_width, box_height) in templates().items():
        aspect = np.log((right - left) / (bottom - top)) - np.log(box_width / box_height)
        if abs(aspect) <= ASPECT_TOLERANCE:
            overlaps[shape] = float((outline & template).sum() / (outline | template).sum())
    shape = max(overlaps, key=lambda name: overlaps[name], default=UNKNOWN)
    box_side = max(templates()[shape][1:]) if shape != UNKNOWN else 2.0
    colour = np.median(rgb[core], axis=0)
    if behind is None:
        cover = alpha
    else:
        direction = colour - behind
        cover = ((rgb - behind) * direction).sum(-1) / np.maximum((direction**2).sum(-1), 1.0)
    return FoundThing(
        shape=shape if overlaps.get(shape, 0.0) >= MIN_OVERLAP else UNKNOWN,
        colour=nearest_colour(colour),
        centre=(float((left + right) / width - 1), float((top + bottom) / height - 1)),
        radius=float(max(right - left, bottom - top) / box_side / (min(width, height) / 2)),
        overlap=overlaps.get(shape, 0.0),
        edge_px=edge_width_px(cover, region),
    )


def edge_width_px(cover: np.ndarray, region: np.ndarray) -> float:
    """Mean width of the transition from 10 to 90 % cover along a region's outline: the area of the transition over the
    outline's length, which is the total variation of `cover` there."""
    band = dilate(region, EDGE_BAND_PX) & ~erode(region, EDGE_BAND_PX)
    cover = cover.clip(0, 1)
    length = float(np.hypot(*np.gradient(cover))[band].sum())
    return float(((cover > 0.1) & (cover < 0.9))[band].sum()) / max(length, 1.0)


@lru_cache(maxsize=1)
def templates() -> dict[str, tuple[np.ndarray, float, float]]:
    """Every shape's outline scaled to a square, and its true width and height in radii."""
    found = {}
    for shape in SHAPES:
        thing = Thing(shape, "black", "large", "center", (0.0, 0.0), 0.9)
        mask = draw([Scene((thing,), Background("transparent"))])[0, ..., 3] > 127
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        box = Image.fromarray(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.uint8) * 255)
        outline = np.asarray(box.resize((TEMPLATE_SIDE, TEMPLATE_SIDE), Image.Resampling.BILINEAR)) > 127
        radius_px = 0.9 * 128
        found[shape] = (outline, len(columns) / radius_px, len(rows) / radius_px)
    return found
