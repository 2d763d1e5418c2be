"""Compares what a picture shows with the scene that was asked for, attribute by attribute."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from app.evaluation.analysis import Finding, FoundThing, analyse
from app.evaluation.edits import Edit
from app.evaluation.regions import erode
from app.evaluation.render import draw
from app.evaluation.scenes import PLACES, SIZES, Scene, Thing

PLACE_TOLERANCE = 0.25  # half the distance between neighbouring places
MIN_CLEAN = 0.97
CLEAR, SOLID = 0.05, 0.95
MIN_KEPT_PSNR_DB = 25.0
KEPT_MARGIN_PX = 8
ATTRIBUTES = ("colour", "shape", "size", "position", "background", "alpha")


def judge_scene(scene: Scene, finding: Finding) -> dict[str, bool]:
    """Which attributes are right. Things are paired with the found ones so that most is right; a missing or an extra
    thing makes colour, shape, size and position wrong."""
    verdict = dict.fromkeys(("colour", "shape", "size", "position"), False)
    if len(finding.things) == len(scene.things):
        pairings = (zip(scene.things, order, strict=True) for order in permutations(finding.things))
        judged = [[_judge_thing(thing, found) for thing, found in pairing] for pairing in pairings]
        best = max(judged, key=lambda verdicts: sum(sum(one.values()) for one in verdicts))
        verdict = {name: all(one[name] for one in best) for name in verdict}
    verdict["background"] = finding.background == scene.background and finding.clean >= MIN_CLEAN
    if scene.background.kind == "transparent":
        verdict["alpha"] = finding.alpha_outside <= CLEAR and finding.alpha_inside >= SOLID
    else:
        verdict["alpha"] = finding.alpha_outside >= SOLID and finding.alpha_inside >= SOLID
    return verdict


def _judge_thing(thing: Thing, found: FoundThing) -> dict[str, bool]:
    middle = PLACES[thing.place]
    if thing.place in ("left", "right") and abs(thing.centre[0]) > 0.56:  # in a row of three
        middle = thing.centre
    return {
        "colour": found.colour == thing.colour,
        "shape": found.shape == thing.shape,
        "size": abs(found.radius - SIZES[thing.size]) < 0.065,
        "position": all(abs(a - b) < PLACE_TOLERANCE for a, b in zip(found.centre, middle, strict=True)),
    }


def kept_psnr_db(edit: Edit, picture: np.ndarray) -> float:
    """PSNR of a picture against the edit's base where the ideal result equals the base, a margin left out; infinite
    where nothing is to be kept. Colours under full transparency do not count."""
    height, width, _ = picture.shape
    base, ideal = _visible(draw([edit.sources[edit.base], edit.target], width, height))
    changed = np.abs(base - ideal).max(-1) > 2
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    kept = ~changed
    if edit.kind in ("cut out", "background"):  # the change goes all around what is kept
        kept = erode(kept, 3)
    elif len(rows):
        margin = KEPT_MARGIN_PX
        kept[max(0, rows[0] - margin) : rows[-1] + margin, max(0, columns[0] - margin) : columns[-1] + margin] = False
    if not kept.any():
        return float("inf")
    error = float(np.mean((_visible(picture[None])[0][kept] - base[kept]) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


def _visible(pictures: np.ndarray) -> np.ndarray:
    """RGBA with colours faded to black as alpha falls, as float: what can be seen of them."""
    wide = pictures.astype(np.float64)
    return np.concatenate([wide[..., :3] * wide[..., 3:] / 255, wide[..., 3:]], axis=-1)


def judge_edit(edit: Edit, picture: np.ndarray) -> dict[str, bool]:
    """Whether the picture shows the target, and whether the rest was kept."""
    verdict = judge_scene(edit.target, analyse(picture))
    return {"obeyed": all(verdict.values()), "kept": kept_psnr_db(edit, picture) >= MIN_KEPT_PSNR_DB}
