"""Bytes to pictures and back. Everything here is slow enough to belong in a thread, never on the event loop.

An upload is what its content says: PNG, JPEG or WebP. Its header decides whether it is decoded at all, so a small file
can't unfold into gigabytes. Of an animation the first frame is taken. Colour profiles are not applied, as in the
reference pipeline. No metadata survives in either direction.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, ImageFile

from app.errors import invalid
from app.png import encode_png

OutputFormat = Literal["png", "webp", "jpeg"]
Background = Literal["auto", "transparent", "opaque"]

INPUT_FORMATS = ("PNG", "JPEG", "WEBP")
MAX_INPUT_ASPECT = 20
JPEG_SCAN = b"\xff\xda"  # never part of the compressed data
MAX_JPEG_SCANS = 100  # progressive files have about ten; each one costs a pass over the whole picture

UPRIGHT = {  # what undoes each EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

UNREADABLE = (  # what Pillow raises at a damaged file
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    struct.error,
    zlib.error,
)


def decode_upload(data: bytes, *, max_pixels: int) -> Image.Image:
    """The picture in `data`: RGBA, upright, without metadata. Raises `ApiError` with status 400."""
    if not data:
        raise invalid("An image file is empty.", param="image", code="invalid_image")
    Image.MAX_IMAGE_PIXELS = None  # Pillow's own cap, which only warns up to twice its value; ours follows the header
    try:
        with Image.open(io.BytesIO(data), formats=INPUT_FORMATS) as image:
            if image.format not in INPUT_FORMATS:  # the JPEG reader opens MPO as well
                raise invalid("An image is neither PNG, JPEG nor WebP.", param="image", code="invalid_image")
            check_dimensions(*image.size, max_pixels=max_pixels)
            if image.format == "JPEG" and data.count(JPEG_SCAN) > MAX_JPEG_SCANS:
                raise invalid("An image has too many progressive scans.", param="image", code="invalid_image")
            scale_transparency(image)
            image.load()
            picture = upright(to_rgba(image), image)
    except UNREADABLE as error:
        message = "An image could not be read: it must be a complete PNG, JPEG or WebP file."
        raise invalid(message, param="image", code="invalid_image") from error
    picture.info = {}
    return picture


def scale_transparency(image: ImageFile.ImageFile) -> None:
    """Bring the one transparent colour of a PNG to the 8 bits that Pillow turns its pixels into; call before `load`."""
    key = image.info.get("transparency")
    raw_mode = image.tile[0][3] if image.tile else None
    if isinstance(key, int) and raw_mode in ("L;2", "L;4"):
        image.info["transparency"] = key * {"L;2": 85, "L;4": 17}[raw_mode]
    elif isinstance(key, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(channel >> 8 for channel in key)


def check_dimensions(width: int, height: int, *, max_pixels: int) -> None:
    """Judge an upload by its header."""
    if width * height > max_pixels:
        message = f"An image has more than {max_pixels} pixels."
        raise invalid(message, param="image", code="image_too_large")
    if max(width, height) > MAX_INPUT_ASPECT * min(width, height):
        message = f"An image is more than {MAX_INPUT_ASPECT} times as long as it is wide."
        raise invalid(message, param="image", code="invalid_image")


def upright(picture: Image.Image, source: Image.Image) -> Image.Image:
    """Turn `picture` as the EXIF data of `source` asks; broken EXIF data asks for nothing."""
    try:
        orientation = source.getexif().get(ExifTags.Base.Orientation)
    except UNREADABLE:
        return picture
    return picture.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else picture


def to_rgba(image: Image.Image) -> Image.Image:
    """Convert without the two losses of `Image.convert`: it clips 16-bit grey, and can't go from CMYK to RGBA."""
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.uint32)  # 0 to 65,535
        grey = ((levels * 255 + 32767) // 65535).astype(np.uint8)
        transparent_level = image.info.get("transparency", -1)
        alpha = np.where(levels == transparent_level, 0, 255).astype(np.uint8)
        return Image.fromarray(np.stack([grey, grey, grey, alpha], axis=-1))
    if image.mode == "CMYK":
        image = image.convert("RGB")
    return image.convert("RGBA")


USED_ALPHA = 224  # below it a pixel can be seen through; a network that draws an opaque picture leaves some at 240


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded output, and whether it kept an alpha channel."""

    data: bytes
    transparent: bool


def encode(pixels: np.ndarray, output_format: OutputFormat, background: Background, compression: int) -> EncodedImage:
    """Encode (height, width, 4) uint8 RGBA. `compression` is the quality, 0 to 100, of the lossy formats."""
    alpha = pixels[..., 3]
    uses_alpha = bool((alpha < USED_ALPHA).any())
    transparent = background == "transparent" or (background == "auto" and uses_alpha and output_format != "jpeg")
    picture = Image.fromarray(pixels)
    if not transparent:
        if (alpha < 255).any():
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        picture = picture.convert("RGB")
    file = io.BytesIO()
    match output_format:
        case "png":
            file.write(encode_png(np.asarray(picture)))
        case "webp":
            picture.save(file, "WEBP", quality=compression, exact=True)
        case "jpeg":
            picture.save(file, "JPEG", quality=compression, subsampling="4:4:4")
    return EncodedImage(file.getvalue(), transparent)
