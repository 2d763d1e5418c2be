"""Changes to pictures: source scenes, an instruction in words, and the scene that obeys it.

The kinds with two sources read their pictures in order, and some instructions name them the other way round, so that
the order matters. A tenth of all edits is held out, by kind and by the keys of both scenes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from app.evaluation.captions import PLACE_WORDS, colour_word, shape_word, with_article
from app.evaluation.scenes import (
    COLOURS,
    PLACES,
    SHAPES,
    Background,
    Scene,
    Thing,
    draw_scene,
    draw_thing,
    has_held_out_pair,
    is_held_out_key,
    stands_out,
)

ONE_IMAGE = ("recolour", "replace", "move", "resize", "remove", "cut out", "background")
TWO_IMAGES = ("shape and colour", "thing and background")


@dataclass(frozen=True, slots=True)
class Edit:
    """`base` is the index of the source whose rest must stay as it is."""

    kind: str
    sources: tuple[Scene, ...]
    instruction: str
    target: Scene
    base: int = 0

    @property
    def is_held_out(self) -> bool:
        things = [thing for scene in (*self.sources, self.target) for thing in scene.things]
        keys = " / ".join(scene.key for scene in (*self.sources, self.target))
        return has_held_out_pair(things) or is_held_out_key(f"{self.kind}: {keys}")


def draw_edit(rng: Random, kind: str, accept: Callable[[Edit], bool]) -> Edit:
    """A random edit of a kind that `accept` takes."""
    while True:
        edit = _DRAW[kind](rng)
        if edit is not None and _is_clear(edit.target) and accept(edit):
            return edit


def _is_clear(scene: Scene) -> bool:
    return all(stands_out(thing.colour, scene.background) for thing in scene.things)


def _source(rng: Random, most: int = 2) -> Scene:
    """Scenes to be edited have one thing, or two of different shapes, so that a shape names a thing."""

    def accept(scene: Scene) -> bool:
        shapes = [thing.shape for thing in scene.things]
        return len(shapes) <= most and len(set(shapes)) == len(shapes)

    return draw_scene(rng, accept)


def _pick(rng: Random, scene: Scene) -> tuple[int, Thing, str]:
    """A thing and words for it: `it` only where it is alone."""
    index = rng.randrange(len(scene.things))
    thing = scene.things[index]
    words = f"the {shape_word(thing.shape, rng)}"
    if rng.random() < 0.35:
        words = f"the {colour_word(thing.colour, rng)} {words[4:]}"
    if len(scene.things) == 1 and rng.random() < 0.4:
        words = "it"
    return index, thing, words


def _with(scene: Scene, index: int, thing: Thing) -> Scene:
    return replace(scene, things=(*scene.things[:index], thing, *scene.things[index + 1 :]))


def _recolour(rng: Random) -> Edit | None:
    scene = _source(rng)
    index, thing, words = _pick(rng, scene)
    colour = rng.choice([name for name in COLOURS if name != thing.colour])
    name = colour_word(colour, rng)
    colour_of = "its color" if words == "it" else f"the color of {words}"
    forms: tuple[str, ...] = (f"make {words} {name}", f"make {words} {name}", f"turn {words} {name}",
                              f"paint {words} {name}", f"change {colour_of} to {name}")  # fmt: skip
    return Edit("recolour", (scene,), _say(forms, rng), _with(scene, index, replace(thing, colour=colour)))


def _replace(rng: Random) -> Edit | None:
    scene = _source(rng)
    index, thing, words = _pick(rng, scene)
    taken = {other.shape for other in scene.things}
    shape = rng.choice([name for name in SHAPES if name not in taken])
    name = with_article(shape_word(shape, rng))
    forms: tuple[str, ...] = (f"replace {words} with {name}", f"replace {words} with {name}",
                              f"turn {words} into {name}", f"swap {words} for {name}",
                              f"change {words} into {name}")  # fmt: skip
    return Edit("replace", (scene,), _say(forms, rng), _with(scene, index, replace(thing, shape=shape)))


def _move(rng: Random) -> Edit | None:
    scene = _source(rng, most=1)
    index, thing, words = _pick(rng, scene)
    place = rng.choice([name for name in PLACES if name != thing.place])
    where = rng.choice(PLACE_WORDS[place])
    to = f"to the {place}" if rng.random() < 0.6 else where
    there = draw_thing(rng, thing.size, place)
    moved = replace(thing, place=place, centre=there.centre)
    forms: tuple[str, ...] = (f"move {words} {to}", f"move {words} {to}", f"put {words} {where}", f"shift {words} {to}")
    return Edit("move", (scene,), _say(forms, rng), _with(scene, index, moved))


def _resize(rng: Random) -> Edit | None:
    scene = _source(rng, most=1)
    index, thing, words = _pick(rng, scene)
    size = rng.choice([name for name in ("small", "large") if name != thing.size])
    resized = draw_thing(rng, size, thing.place, thing.centre, shape=thing.shape, colour=thing.colour)
    forms: tuple[str, ...] = (f"make {words} {size}", f"make {words} {'bigger' if size == 'large' else 'smaller'}",
                              f"{'enlarge' if size == 'large' else 'shrink'} {words}")  # fmt: skip
    return Edit("resize", (scene,), _say(forms, rng), _with(scene, index, resized))


def _remove(rng: Random) -> Edit | None:
    scene = _source(rng)
    if len(scene.things) < 2:
        return None
    index, _, words = _pick(rng, scene)
    forms: tuple[str, ...] = (f"remove {words}", f"remove {words}", f"erase {words}", f"delete {words}")
    rest = replace(scene, things=(*scene.things[:index], *scene.things[index + 1 :]))
    return Edit("remove", (scene,), _say(forms, rng), rest)


def _cut_out(rng: Random) -> Edit | None:
    scene = _source(rng)
    if scene.background.kind == "transparent":
        return None
    forms = ("remove the background", "remove the background", "make the background transparent",
             "delete the background", "cut it out", "on a transparent background")  # fmt: skip
    return Edit("cut out", (scene,), _say(forms, rng), replace(scene, background=Background("transparent")))


def _background(rng: Random) -> Edit | None:
    scene = _source(rng)
    colour = rng.choice(tuple(COLOURS))
    background = Background("plain", (colour,))
    if scene.background == background:
        return None
    name = colour_word(colour, rng)
    forms: tuple[str, ...] = (f"make the background {name}", f"change the background to {name}",
                              f"put it on {with_article(name)} background", f"{name} background")  # fmt: skip
    return Edit("background", (scene,), _say(forms, rng), replace(scene, background=background))


def _image_words(rng: Random, index: int) -> str:
    number, ordinal = ("1", "2")[index], ("first", "second")[index]
    return rng.choice((f"the {ordinal}", f"the {ordinal}", f"the {ordinal} image", f"the {ordinal} picture",
                       f"image {number}"))  # fmt: skip


def _shape_and_colour(rng: Random) -> Edit | None:
    sources = (_source(rng, most=1), _source(rng, most=1))
    base = int(rng.random() < 0.4)
    first, second = _image_words(rng, base), _image_words(rng, 1 - base)
    colour = rng.choice(("color", "colour"))
    forms = (f"the shape of {first} in the {colour} of {second}", f"the shape of {first} in the {colour} of {second}",
             f"draw the shape of {first} in the {colour} of {second}",
             f"give the shape of {first} the {colour} of {second}")  # fmt: skip
    tinted = replace(sources[base].things[0], colour=sources[1 - base].things[0].colour)
    if tinted == sources[base].things[0]:
        return None
    return Edit("shape and colour", sources, _say(forms, rng), _with(sources[base], 0, tinted), base)


def _thing_and_background(rng: Random) -> Edit | None:
    sources = (_source(rng, most=1), _source(rng, most=1))
    base = int(rng.random() < 0.6)  # the picture that gives the background
    if sources[0].background == sources[1].background:
        return None
    first, second = _image_words(rng, 1 - base), _image_words(rng, base)
    forms = (f"put the shape of {first} on the background of {second}",
             f"put the object of {first} on the background of {second}",
             f"the object of {first} on the background of {second}")  # fmt: skip
    target = replace(sources[1 - base], background=sources[base].background)
    return Edit("thing and background", sources, _say(forms, rng), target, base)


def _say(forms: Sequence[str], rng: Random) -> str:
    text = rng.choice(forms)
    if rng.random() < 0.15:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.1 else text


_DRAW: dict[str, Callable[[Random], Edit | None]] = {
    "recolour": _recolour,
    "replace": _replace,
    "move": _move,
    "resize": _resize,
    "remove": _remove,
    "cut out": _cut_out,
    "background": _background,
    "shape and colour": _shape_and_colour,
    "thing and background": _thing_and_background,
}
