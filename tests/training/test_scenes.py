"""The world of shapes: what is drawn, what is said about it, what is held out."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from app.evaluation.captions import SHAPE_WORDS, SIZE_WORDS, caption
from app.evaluation.edits import ONE_IMAGE, TWO_IMAGES, draw_edit
from app.evaluation.render import SceneBatch, draw, render
from app.evaluation.scenes import (
    COLOURS,
    HELD_OUT_PAIRS,
    MIN_CONTRAST,
    SHAPES,
    Background,
    Scene,
    Thing,
    contrast,
    draw_scene,
    stands_out,
)
from app.evaluation.suite import edit_cases, scene_cases


def one(shape: str = "circle", colour: str = "red", background: Background | None = None) -> Scene:
    thing = Thing(shape, colour, "large", "center", (0.0, 0.0), 0.5)
    return Scene((thing,), background or Background("plain", ("white",)))


def scenes(count: int, seed: int = 0) -> list[Scene]:
    rng = Random(seed)
    return [draw_scene(rng, lambda scene: True) for _ in range(count)]


def test_circle_covers_its_area_and_has_a_soft_edge() -> None:
    (picture,) = draw([one()])
    assert tuple(picture[128, 128]) == (*COLOURS["red"], 255)
    assert tuple(picture[4, 4]) == (*COLOURS["white"], 255)
    covered = (COLOURS["white"][1] - picture[..., 1].astype(float)) / (COLOURS["white"][1] - COLOURS["red"][1])
    assert covered.sum() == pytest.approx(np.pi * (0.5 * 0.9 * 128) ** 2, rel=0.002)
    assert 0 < ((covered > 0.05) & (covered < 0.95)).sum() < 3 * 2 * np.pi * 58


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_stay_inside_their_radius_and_are_centred(shape: str) -> None:
    (picture,) = draw([one(shape, background=Background("transparent"))])
    rows, columns = np.nonzero(picture[..., 3] > 127)
    for axis in (rows, columns):
        assert abs(axis.min() + axis.max() - 255) <= 6
        assert axis.min() >= 128 - 66 and axis.max() <= 128 + 66


def test_transparent_background_is_clear_and_edges_keep_the_colour() -> None:
    (picture,) = draw([one(background=Background("transparent"))])
    assert picture[4, 4, 3] == 0
    half = (picture[..., 3] > 60) & (picture[..., 3] < 200)
    assert half.any()
    assert (picture[half][:, :3] == COLOURS["red"]).all()


@pytest.mark.parametrize(
    ("kind", "corners"),
    [
        ("vertical", ("red", "red", "blue")),
        ("horizontal", ("red", "blue", "red")),
        ("checkered", ("red", "blue", "blue")),
    ],
)
def test_backgrounds_run_the_right_way(kind: str, corners: tuple[str, str, str]) -> None:
    (picture,) = draw([one(colour="black", background=Background(kind, ("red", "blue")))])
    for (row, column), colour in zip(((2, 2), (2, 253), (253, 2)), corners, strict=True):
        assert np.abs(picture[row, column, :3] - np.array(COLOURS[colour], float)).max() < 4


def test_other_sizes_keep_shapes_round() -> None:
    (picture,) = draw([one(background=Background("transparent"))], width_px=320, height_px=192)
    rows, columns = np.nonzero(picture[..., 3] > 127)
    assert np.ptp(rows) == np.ptp(columns)


def test_a_batch_equals_its_scenes_alone() -> None:
    drawn = scenes(6)
    together = (render(SceneBatch.of(drawn), 256, 256) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert np.abs(together.astype(int) - draw(drawn)).max() <= 1


def test_colours_can_be_told_apart() -> None:
    names = list(COLOURS)
    assert all(contrast(a, b) >= MIN_CONTRAST for i, a in enumerate(names) for b in names[:i])
    assert not stands_out("gray", Background("vertical", ("white", "black")))
    assert stands_out("red", Background("transparent"))


def test_scenes_are_seeded_inside_the_picture_and_apart() -> None:
    assert scenes(20) == scenes(20)
    for scene in scenes(400):
        for thing in scene.things:
            assert max(map(abs, thing.centre)) + thing.radius <= 1
        for a, b in zip(scene.things, scene.things[1:], strict=False):
            assert np.hypot(*np.subtract(a.centre, b.centre)) > (a.radius + b.radius) * 0.9


def test_a_tenth_is_held_out_and_pairs_wholly() -> None:
    drawn = scenes(3000)
    held_out = [scene for scene in drawn if scene.is_held_out]
    assert 0.08 < len(held_out) / len(drawn) < 0.25  # a tenth, and the pairs
    for shape, colour in HELD_OUT_PAIRS:
        assert one(shape, colour).is_held_out


def test_complete_captions_name_everything() -> None:
    rng = Random(1)
    for scene in scenes(300):
        text = caption(scene, rng, complete=True).lower().replace("grey", "gray")
        for thing in scene.things:
            assert thing.colour in text
            assert any(word in text for word in SHAPE_WORDS.get(thing.shape, (thing.shape,)))
            assert any(word in text for word in SIZE_WORDS[thing.size])
        assert all(colour in text for colour in scene.background.colours)
        assert (" a orange" not in text) and (not text.startswith("a orange"))


def test_captions_vary_and_leave_out_only_white_backgrounds() -> None:
    rng = Random(2)
    red_on_blue, red_on_white = one(background=Background("plain", ("blue",))), one()
    assert len({caption(red_on_blue, rng) for _ in range(200)}) > 100
    assert all("blue" in caption(red_on_blue, rng).lower() for _ in range(200))
    assert any("white" not in caption(red_on_white, rng).lower() for _ in range(50))


@pytest.mark.parametrize("kind", [*ONE_IMAGE, *TWO_IMAGES])
def test_edits_change_what_they_say(kind: str) -> None:
    rng = Random(3)
    for _ in range(40):
        edit = draw_edit(rng, kind, lambda drawn: True)
        assert edit.kind == kind and len(edit.sources) == 1 + (kind in TWO_IMAGES)
        assert edit.target not in edit.sources
        base = edit.sources[edit.base]
        if kind in ("recolour", "replace", "move", "resize", "remove", "shape and colour", "thing and background"):
            assert edit.target.background == base.background
        if kind in ("cut out", "background"):
            assert edit.target.things == base.things
        if kind == "remove":
            assert set(edit.target.things) < set(base.things)


def test_suite_holds_only_what_training_never_saw() -> None:
    cases = scene_cases(60)
    assert cases == scene_cases(60)
    assert all(case.target.is_held_out for case in cases)
    edits = edit_cases(18)
    assert all(case.edit is not None and case.edit.is_held_out for case in edits)
    assert set(Counter(case.edit.kind for case in edits if case.edit).values()) == {2}
