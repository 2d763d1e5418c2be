"""Pictures to send, and how far apart two pictures are."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
from PIL import Image


def condition_picture(side_px: int = 128) -> bytes:
    """A PNG with something in it: colours that change in both directions."""
    ramp = np.linspace(0, 255, side_px).astype(np.uint8)
    red, green = np.meshgrid(ramp, ramp)
    pixels = np.stack((red, green, np.full_like(red, 90)), axis=-1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pixels_of(b64_file: str) -> np.ndarray:
    """(height, width, 4) uint8."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64_file))).convert("RGBA"))


def as_json(figures: object) -> str:
    """A file's worth of figures. Infinity, which equal pictures have, is null: JSON has no number for it."""

    def known(value: object) -> object:
        match value:
            case dict():
                return {key: known(entry) for key, entry in value.items()}
            case list() | tuple():
                return [known(entry) for entry in value]
        return None if value == float("inf") else value

    return json.dumps(known(figures), indent=1, allow_nan=False) + "\n"


def psnr_db(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures; infinite when they are equal, 0 when their shapes differ."""
    if ours.shape != theirs.shape:
        return 0.0
    error = float(np.mean((ours.astype(np.float64) - theirs.astype(np.float64)) ** 2))
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
