"""Condition images for tests: real photographs from scikit-image, in several modes and shapes."""

from __future__ import annotations

from PIL import Image
from skimage import data


def photo(mode: str = "RGB", size_px: tuple[int, int] | None = None) -> Image.Image:
    """A photograph in `mode`: RGBA has a transparent corner, P a small palette, L and RGB are plain."""
    source = Image.fromarray({"RGBA": data.coffee, "L": data.camera, "P": data.rocket}.get(mode, data.astronaut)())
    picture = source.resize(size_px) if size_px else source
    if mode == "RGBA":
        picture = picture.convert("RGBA")
        alpha = Image.linear_gradient("L").resize(picture.size)
        picture.putalpha(alpha)
        return picture
    if mode == "P":
        return picture.convert("RGB").quantize(17)
    return picture.convert(mode)
