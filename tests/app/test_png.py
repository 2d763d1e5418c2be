from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from app import png
from app.png import encode_png


def picture(height: int, width: int, channels: int) -> np.ndarray:
    """Smooth and noisy parts, and every value."""
    draw = np.random.default_rng(height * width)
    pixels = draw.integers(0, 256, (height, width, channels), dtype=np.uint8)
    pixels[height // 2 :] = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    return pixels


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 300), (64, 1), (97, 130), (700, 513)])
def test_pillow_reads_back_every_pixel(height: int, width: int, channels: int) -> None:
    pixels = picture(height, width, channels)
    with Image.open(io.BytesIO(encode_png(pixels))) as read:
        read.load()
        assert (read.format, read.mode, read.info) == ("PNG", {3: "RGB", 4: "RGBA"}[channels], {})
        assert np.array_equal(np.asarray(read), pixels)


@pytest.mark.parametrize("strip_bytes", [1, 1000, 2**24])
def test_strips_of_any_size_join(strip_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png, "STRIP_BYTES", strip_bytes)
    pixels = picture(31, 50, 4)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


def test_pictures_that_do_not_own_their_memory() -> None:
    pixels = picture(40, 60, 4)[5:35, 10:50]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


def test_flat_pictures_are_small() -> None:
    assert len(encode_png(np.full((1024, 1024, 4), 200, np.uint8))) < 40_000
