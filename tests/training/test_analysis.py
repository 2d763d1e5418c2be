"""The plain image analysis: it accepts the right picture, and rejects one that is wrong in a single attribute."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from app.evaluation.analysis import analyse, nearest_colour
from app.evaluation.edits import ONE_IMAGE, TWO_IMAGES, draw_edit
from app.evaluation.judge import judge_edit, judge_scene
from app.evaluation.regions import connected_regions, dilate, erode
from app.evaluation.render import draw
from app.evaluation.scenes import Background, Scene, Thing, draw_scene
from app.evaluation.suite import Case, judge, scores, table

STAR = Thing("star", "blue", "medium", "left", (-0.5, 0.0), 0.37)
RING = Thing("ring", "red", "small", "right", (0.5, 0.0), 0.26)
SCENE = Scene((STAR, RING), Background("plain", ("yellow",)))
WRONG = {
    "colour": replace(SCENE, things=(replace(STAR, colour="green"), RING)),
    "shape": replace(SCENE, things=(replace(STAR, shape="circle"), RING)),
    "size": replace(SCENE, things=(STAR, replace(RING, radius=0.4))),
    "position": replace(SCENE, things=(replace(STAR, centre=(-0.5, -0.5)), RING)),
    "background": replace(SCENE, background=Background("plain", ("white",))),
}


def test_accepts_every_rendered_scene() -> None:
    rng = Random(5)
    scenes = [draw_scene(rng, lambda scene: True) for _ in range(60)]
    for scene, picture in zip(scenes, draw(scenes), strict=True):
        finding = analyse(picture)
        assert all(judge_scene(scene, finding).values()), (scene, finding)
        assert all(thing.edge_px < 1.5 for thing in finding.things)


@pytest.mark.parametrize("attribute", WRONG)
def test_rejects_one_wrong_attribute(attribute: str) -> None:
    verdict = judge_scene(SCENE, analyse(draw([WRONG[attribute]])[0]))
    assert [name for name, right in verdict.items() if not right] == [attribute]


def test_swapped_things_are_in_the_wrong_places() -> None:
    swapped = replace(SCENE, things=(replace(STAR, centre=RING.centre), replace(RING, centre=STAR.centre)))
    assert not judge_scene(SCENE, analyse(draw([swapped])[0]))["position"]


@pytest.mark.parametrize("things", [(), (STAR,), (STAR, RING, replace(STAR, centre=(0.0, 0.6), radius=0.26))])
def test_missing_and_extra_things_are_wrong(things: tuple[Thing, ...]) -> None:
    verdict = judge_scene(SCENE, analyse(draw([Scene(things or (RING,), SCENE.background)])[0]))
    assert not verdict["shape"] and not verdict["colour"] and verdict["background"]


def test_half_transparent_is_not_transparent() -> None:
    clear = replace(SCENE, background=Background("transparent"))
    (picture,) = draw([clear])
    assert judge_scene(clear, analyse(picture))["alpha"]
    hazy = picture.copy()
    hazy[..., 3] = np.maximum(hazy[..., 3], 40)
    assert not judge_scene(clear, analyse(hazy))["alpha"]
    thin = picture.copy()
    thin[..., 3] = thin[..., 3] * 0.8
    assert not judge_scene(clear, analyse(thin))["alpha"]
    assert not judge_scene(SCENE, analyse(picture))["alpha"]


def test_noise_shows_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 4), dtype=np.uint8)
    verdict = judge_scene(SCENE, analyse(noise))
    assert not any(verdict[name] for name in ("colour", "shape", "position", "background"))


def test_blurred_edges_are_wide() -> None:
    (picture,) = draw([Scene((replace(STAR, shape="circle"),), SCENE.background)])
    blurred = np.asarray(Image.fromarray(picture[..., :3]).filter(ImageFilter.GaussianBlur(3)))
    blurred = np.concatenate([blurred, picture[..., 3:]], axis=-1)
    assert analyse(picture).things[0].edge_px < 1.2
    assert 5 < analyse(blurred).things[0].edge_px < 10


@pytest.mark.parametrize("kind", [*ONE_IMAGE, *TWO_IMAGES])
def test_edits_are_judged(kind: str) -> None:
    rng = Random(6)
    for _ in range(4):
        edit = draw_edit(rng, kind, lambda drawn: True)
        target, *sources = draw([edit.target, *edit.sources])
        assert judge_edit(edit, target) == {"obeyed": True, "kept": True}
        assert not judge_edit(edit, sources[edit.base])["obeyed"]


def test_an_edit_must_keep_the_rest() -> None:
    rng = Random(7)
    edit = draw_edit(rng, "recolour", lambda drawn: drawn.target.background.kind == "plain")
    (picture,) = draw([edit.target])
    touched = picture.astype(int)
    touched[..., :3] = np.clip(touched[..., :3] + 18 * np.sign(127 - touched[..., :3]), 0, 255)
    assert not judge_edit(edit, touched.astype(np.uint8))["kept"]


def test_nearest_colour_has_a_limit() -> None:
    assert nearest_colour(np.array([225, 45, 40])) == "red"
    assert nearest_colour(np.array([0, 255, 0])) == "unknown"


def test_regions_are_joined_across_rows() -> None:
    mask = np.zeros((12, 12), bool)
    mask[2:9, 2] = mask[2:9, 6] = mask[8, 2:7] = True  # a U: two runs that meet at the bottom
    mask[0, 10:] = True
    assert sorted(int(region.sum()) for region in connected_regions(mask, 1)) == [2, 17]
    assert len(connected_regions(mask, 3)) == 1
    assert not erode(mask, 1).any()
    assert dilate(mask, 1)[9, 7]


def test_scores_add_up() -> None:
    pictures = draw([SCENE, WRONG["colour"]])
    judged = [judge(Case("a prompt", SCENE, 0), picture) for picture in pictures]
    found = {score.name: (score.right, score.count) for score in scores(judged)}
    assert found["colour"] == (1, 2) and found["shape"] == (2, 2) and found["all right, 2 things"] == (1, 2)
    assert "50.0 %" in table(judged)
