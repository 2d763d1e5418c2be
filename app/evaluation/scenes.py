"""The small world that the embedded checkpoint was trained to draw: one to three shapes on a background. Plain data.

A scene is everything a picture shows, numbers included. Its `key` holds what a full caption names; a tenth of all keys
and a few pairs of shape and colour are held out: training never sees them, and evaluation draws nothing else.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

Rgb = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")
COLOURS: dict[str, Rgb] = {
    "red": (220, 40, 45),
    "orange": (245, 135, 30),
    "yellow": (250, 220, 60),
    "green": (50, 165, 75),
    "cyan": (60, 205, 205),
    "blue": (40, 90, 215),
    "purple": (130, 55, 175),
    "pink": (245, 135, 190),
    "brown": (120, 75, 40),
    "black": (25, 25, 28),
    "white": (250, 250, 250),
    "gray": (135, 135, 140),
}
SIZES = {"small": 0.26, "medium": 0.37, "large": 0.5}  # radius, as a part of half the shorter side
PLACES: dict[str, tuple[float, float]] = {  # centre, from -1 (left, top) to 1 (right, bottom)
    "center": (0.0, 0.0),
    "left": (-0.5, 0.0),
    "right": (0.5, 0.0),
    "top": (0.0, -0.5),
    "bottom": (0.0, 0.5),
    "top left": (-0.5, -0.5),
    "top right": (0.5, -0.5),
    "bottom left": (-0.5, 0.5),
    "bottom right": (0.5, 0.5),
}
ROW = (-0.64, 0.0, 0.64)  # centres of three things side by side
PAIRS = (("left", "right"), ("top", "bottom"), ("top left", "bottom right"), ("top right", "bottom left"))
BACKGROUNDS = ("plain", "vertical", "horizontal", "checkered", "transparent")
MAX_THINGS = 3

HELD_OUT_PAIRS = frozenset({("heart", "cyan"), ("ring", "brown"), ("star", "gray"), ("triangle", "pink")})
HELD_OUT_PART = 10  # one key in ten
MIN_CONTRAST = 80.0  # distance in RGB between a thing and every colour behind it
CENTRE_JITTER, RADIUS_JITTER, MARGIN = 0.03, 0.06, 0.02


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape. `centre` runs from -1 to 1 on both axes; `radius` is a part of half the picture's shorter side."""

    shape: str
    colour: str
    size: str
    place: str
    centre: tuple[float, float]
    radius: float


@dataclass(frozen=True, slots=True)
class Background:
    """What lies behind: `plain` has one colour, `transparent` none; gradients run from the first colour at the top
    (`vertical`) or on the left (`horizontal`) to the second; `checkered` starts with the first at the top left."""

    kind: str
    colours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """One to three things, from left to right or from top to bottom, on a background."""

    things: tuple[Thing, ...]
    background: Background

    @property
    def key(self) -> str:
        things = ", ".join(f"{thing.colour} {thing.shape} {thing.place}" for thing in self.things)
        return f"{things} on {self.background.kind} {' '.join(self.background.colours)}"

    @property
    def is_held_out(self) -> bool:
        return has_held_out_pair(self.things) or is_held_out_key(self.key)


def has_held_out_pair(things: Sequence[Thing]) -> bool:
    return any((thing.shape, thing.colour) in HELD_OUT_PAIRS for thing in things)


def is_held_out_key(key: str) -> bool:
    """A tenth of all texts, the same on every machine."""
    return zlib.crc32(key.encode()) % HELD_OUT_PART == 0


def contrast(colour: str, other: str) -> float:
    """Distance in RGB."""
    return math.dist(COLOURS[colour], COLOURS[other])


def stands_out(colour: str, background: Background) -> bool:
    """Whether a thing of this colour can be told from the background everywhere, also in the middle of a gradient."""
    if not background.colours:
        return True
    first, last = (COLOURS[name] for name in (background.colours[0], background.colours[-1]))
    steps = 8 if background.kind in ("vertical", "horizontal") else 1
    for step in range(steps + 1):
        behind = (a + (b - a) * step / steps for a, b in zip(first, last, strict=True))
        if sum((a - b) ** 2 for a, b in zip(COLOURS[colour], behind, strict=True)) < MIN_CONTRAST**2:
            return False
    return True


def draw_scene(rng: Random, accept: Callable[[Scene], bool]) -> Scene:
    """A random scene that `accept` takes."""
    while True:
        scene = _draw(rng)
        if all(stands_out(thing.colour, scene.background) for thing in scene.things) and accept(scene):
            return scene


def _draw(rng: Random) -> Scene:
    background = draw_background(rng)
    chance = rng.random()
    if chance < 0.55:
        size = rng.choice(tuple(SIZES))
        return Scene((draw_thing(rng, size, rng.choice(tuple(PLACES))),), background)
    if chance < 0.9:
        places = rng.choice(PAIRS[:2] if rng.random() < 0.8 else PAIRS[2:])
        sizes = [rng.choice(("small", "medium", "large")), rng.choice(("small", "medium"))]
        rng.shuffle(sizes)
        if len(places[0].split()) > 1:  # two large things in opposite corners would meet
            sizes = [size if size != "large" else "medium" for size in sizes]
        things = tuple(draw_thing(rng, size, place) for size, place in zip(sizes, places, strict=True))
        return Scene(things, background)
    row = ("left", "center", "right")
    things = tuple(draw_thing(rng, "small", place, (x, 0.0)) for place, x in zip(row, ROW, strict=True))
    return Scene(things, background)


def draw_thing(
    rng: Random, size: str, place: str, centre: tuple[float, float] | None = None, *, shape: str = "", colour: str = ""
) -> Thing:
    """A thing of a size near a place (or a given centre), wholly inside the picture."""
    radius = SIZES[size] * rng.uniform(1 - RADIUS_JITTER, 1 + RADIUS_JITTER)
    limit = 1 - radius - MARGIN
    x, y = (
        min(limit, max(-limit, middle + rng.uniform(-CENTRE_JITTER, CENTRE_JITTER)))
        for middle in (centre or PLACES[place])
    )
    return Thing(
        shape or rng.choice(SHAPES),
        colour or rng.choice(tuple(COLOURS)),
        size,
        place,
        (round(x, 4), round(y, 4)),
        radius,
    )


def draw_background(rng: Random) -> Background:
    chance = rng.random()
    if chance < 0.25:
        return Background("plain", ("white",))
    if chance < 0.5:
        return Background("plain", (rng.choice(tuple(COLOURS)),))
    if chance < 0.66:
        return Background(rng.choice(("vertical", "horizontal")), tuple(rng.sample(tuple(COLOURS), 2)))
    if chance < 0.8:
        while True:
            colours = tuple(rng.sample(tuple(COLOURS), 2))
            if contrast(*colours) >= MIN_CONTRAST:
                return Background("checkered", colours)
    return Background("transparent")
