"""Words for scenes: the many ways to ask for the same picture. Plain strings, drawn with a seeded generator.

A `complete` caption names every attribute in a scene's key. Others leave some out: an unnamed background is white, any
other unnamed attribute may be anything.
"""

from __future__ import annotations

from random import Random

from app.evaluation.scenes import Background, Scene, Thing

SHAPE_WORDS = {
    "circle": ("circle", "circle", "disc"),
    "ring": ("ring", "ring", "hoop"),
    "cross": ("cross", "cross", "plus sign"),
    "diamond": ("diamond", "diamond", "rhombus"),
}
SIZE_WORDS = {
    "small": ("small", "small", "little", "tiny"),
    "medium": ("medium", "medium-sized"),
    "large": ("large", "large", "big", "huge"),
}
PLACE_WORDS = {
    "center": ("in the center", "in the middle", "in the centre", "centered"),
    "left": ("on the left", "on the left side", "at the left"),
    "right": ("on the right", "on the right side", "at the right"),
    "top": ("at the top", "in the upper part", "near the top"),
    "bottom": ("at the bottom", "in the lower part", "near the bottom"),
    "top left": ("in the top left corner", "in the top left", "at the upper left"),
    "top right": ("in the top right corner", "in the top right", "at the upper right"),
    "bottom left": ("in the bottom left corner", "in the bottom left", "at the lower left"),
    "bottom right": ("in the bottom right corner", "in the bottom right", "at the lower right"),
}
OPENINGS = ("", "", "", "", "draw ", "a picture of ", "an image of ", "show me ", "please draw ", "paint ")


def shape_word(shape: str, rng: Random) -> str:
    return rng.choice(SHAPE_WORDS.get(shape, (shape,)))


def colour_word(colour: str, rng: Random) -> str:
    return "grey" if colour == "gray" and rng.random() < 0.4 else colour


def with_article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def thing_words(thing: Thing, rng: Random, *, complete: bool) -> str:
    """`a big red star`; the size is often left out, unless the caption is complete, colour and shape seldom."""
    words = [rng.choice(SIZE_WORDS[thing.size])] if complete or rng.random() < 0.35 else []
    if complete or rng.random() > 0.04:
        words.append(colour_word(thing.colour, rng))
    if complete or rng.random() > 0.03:
        words.append(shape_word(thing.shape, rng))
    else:
        words.append(rng.choice(("shape", "object", "thing")))
    return with_article(" ".join(words))


def background_words(background: Background, rng: Random) -> str:
    """What follows the things, with its own comma where it needs one."""
    names = [colour_word(colour, rng) for colour in background.colours]
    match background.kind:
        case "plain":
            forms: tuple[str, ...] = (
                " on a {0} background", " on a {0} background", " on a plain {0} background", ", {0} background",
                " on {0}", " over a {0} backdrop", " against a {0} background", " with a {0} background",
            )  # fmt: skip
        case "vertical":
            forms = (
                " on a gradient from {0} to {1}", " on a background fading from {0} to {1}",
                " on a gradient from {0} at the top to {1} at the bottom", ", {0} to {1} gradient background",
                " on a vertical gradient from {0} to {1}",
            )  # fmt: skip
        case "horizontal":
            forms = (
                " on a horizontal gradient from {0} to {1}", ", horizontal {0} to {1} gradient background",
                " on a gradient from {0} on the left to {1} on the right",
                " on a background fading from {0} on the left to {1} on the right",
            )  # fmt: skip
        case "checkered":
            forms = (
                " on a {0} and {1} checkered background", " on a {0} and {1} checkerboard",
                ", checkered {0} and {1} background", " over a checkered background of {0} and {1}",
            )  # fmt: skip
        case _:
            forms = (
                " on a transparent background", " on a transparent background", " with a transparent background",
                ", transparent background", " with no background", ", no background",
            )  # fmt: skip
    text = rng.choice(forms).format(*names)
    return text.replace(" a orange", " an orange")


def may_skip_background(scene: Scene) -> bool:
    """An unnamed background is white, so only a white one may go unnamed."""
    return scene.background == Background("plain", ("white",))


def caption(scene: Scene, rng: Random, *, complete: bool = False) -> str:
    """One way to ask for `scene`."""
    text = _things(scene, rng, complete=complete)
    if complete or not may_skip_background(scene) or rng.random() < 0.6:
        text += background_words(scene.background, rng)
    text = rng.choice(OPENINGS) + text
    if rng.random() < 0.15:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.1 else text


def _things(scene: Scene, rng: Random, *, complete: bool) -> str:
    phrases = [thing_words(thing, rng, complete=complete) for thing in scene.things]
    places = [thing.place for thing in scene.things]
    if len(phrases) == 1:
        if not complete and rng.random() < 0.25:
            return phrases[0]
        return f"{phrases[0]}{rng.choice((' ', ' ', ', '))}{rng.choice(PLACE_WORDS[places[0]])}"
    if len(phrases) == 3:
        forms: tuple[str, ...] = ("{0}, {1} and {2} in a row", "{0}, {1} and {2} side by side", "{0}, {1} and {2}",
                                  "from left to right: {0}, {1} and {2}")  # fmt: skip
        return rng.choice(forms).format(*phrases)
    if places[0] == "left":
        forms = ("{0} to the left of {1}", "{0} left of {1}", "{1} to the right of {0}", "{1} right of {0}",
                 "{0} next to {1}", "{0} and {1} side by side", "{0} and {1}")  # fmt: skip
    elif places[0] == "top":
        forms = ("{0} above {1}", "{0} over {1}", "{1} below {0}", "{1} under {0}", "{0} on top of {1}")
    else:
        forms = ()
    if forms and rng.random() < 0.75:
        return rng.choice(forms).format(*phrases)
    order = [0, 1] if rng.random() < 0.5 else [1, 0]
    return " and ".join(f"{phrases[index]} {rng.choice(PLACE_WORDS[places[index]])}" for index in order)
