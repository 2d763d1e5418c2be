"""Uploads become the right pixels or are refused cheaply; outputs hold the pixels and nothing else."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageDraw, PngImagePlugin

from app.errors import ApiError
from app.images import decode_upload, encode

MAX_PIXELS = 40_000_000


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    picture = decode_upload(data, max_pixels=max_pixels)
    assert picture.mode == "RGBA"
    assert picture.info == {}
    return picture


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def raw_png(width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"") -> bytes:
    """A PNG of forms that Pillow doesn't write."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def assert_unreadable(data: bytes, max_pixels: int = MAX_PIXELS) -> str:
    with pytest.raises(ApiError) as caught:
        decode(data, max_pixels)
    assert caught.value.status == 400
    assert caught.value.detail.param == "image"
    return caught.value.detail.code


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
def test_formats_that_are_read(encoded, file_format):
    picture = decode(encoded(Image.new("RGB", (30, 20), (10, 200, 100)), file_format))
    assert picture.size == (30, 20)
    assert np.abs(np.asarray(picture)[..., :3].astype(int) - (10, 200, 100)).max() <= 4


@pytest.mark.parametrize("file_format", ["GIF", "TIFF", "BMP", "ICO", "PPM", "TGA", "PDF", "AVIF", "MPO", "JPEG2000"])
def test_formats_that_are_refused(encoded, file_format):
    image = Image.new("RGB", (32, 32), "red")
    options = {"save_all": True, "append_images": [image]} if file_format == "MPO" else {}
    assert assert_unreadable(encoded(image, file_format, **options)) == "invalid_image"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<!doctype html>",
        b"%PDF-1.7",
        b"8BPS\0\1",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_what_is_no_image_is_refused(data):
    assert_unreadable(data)


def test_one_bit():
    picture = decode(raw_png(8, 1, 1, 0, b"\0\xa0"))
    assert np.asarray(picture)[0, :4].tolist() == [[255] * 4, [0, 0, 0, 255], [255] * 4, [0, 0, 0, 255]]


@pytest.mark.parametrize("transparency", [1, bytes([255, 0])])
def test_palette_with_transparency(encoded, transparency):
    image = Image.new("P", (2, 1))
    image.putpalette([250, 10, 20, 30, 240, 50])
    image.putdata([0, 1])
    picture = decode(encoded(image, transparency=transparency))
    assert np.asarray(picture)[0].tolist() == [[250, 10, 20, 255], [30, 240, 50, 0]]


def test_grey_with_alpha(encoded):
    picture = decode(encoded(Image.new("LA", (2, 2), (90, 30))))
    assert picture.getpixel((0, 0)) == (90, 90, 90, 30)


def test_grey_and_rgb_with_a_transparent_colour():
    picture = decode(raw_png(2, 1, 8, 0, b"\0\x10\x20", chunk(b"tRNS", b"\0\x10")))
    assert np.asarray(picture)[0].tolist() == [[16, 16, 16, 0], [32, 32, 32, 255]]
    picture = decode(raw_png(2, 1, 8, 2, b"\0\1\2\3\4\5\6", chunk(b"tRNS", b"\0\1\0\2\0\3")))
    assert np.asarray(picture)[0].tolist() == [[1, 2, 3, 0], [4, 5, 6, 255]]


def test_sixteen_bit_grey_is_scaled_not_clipped():
    levels = [0, 256, 32768, 65535]
    picture = decode(raw_png(4, 1, 16, 0, b"\0" + struct.pack(">4H", *levels)))
    assert np.asarray(picture)[0].tolist() == [[v, v, v, 255] for v in (0, 1, 128, 255)]
    picture = decode(
        raw_png(4, 1, 16, 0, b"\0" + struct.pack(">4H", *levels), chunk(b"tRNS", struct.pack(">H", 32768)))
    )
    assert np.asarray(picture)[0, :, 3].tolist() == [255, 255, 0, 255]


def test_sixteen_bit_colour_and_alpha():
    picture = decode(raw_png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0x1234, 0x80FF, 0xFFFF)))
    assert picture.getpixel((0, 0)) == (0x12, 0x80, 0xFF, 255)
    picture = decode(raw_png(1, 1, 16, 6, b"\0" + struct.pack(">4H", 0x1234, 0x80FF, 0xFFFF, 0x4000)))
    assert picture.getpixel((0, 0)) == (0x12, 0x80, 0xFF, 0x40)
    picture = decode(raw_png(1, 1, 16, 4, b"\0" + struct.pack(">2H", 0x8000, 0x4000)))
    assert picture.getpixel((0, 0)) == (0x80, 0x80, 0x80, 0x40)


def test_cmyk(encoded):
    for ink, colour in [((0, 255, 255, 0), (255, 0, 0)), ((255, 0, 0, 0), (0, 255, 255)), ((0, 0, 0, 255), (0, 0, 0))]:
        picture = decode(encoded(Image.new("CMYK", (16, 16), ink), "JPEG", quality=95))
        assert np.abs(np.array(picture.getpixel((8, 8))[:3]) - colour).max() <= 3
        assert picture.getpixel((8, 8))[3] == 255


def marked() -> Image.Image:
    image = Image.new("RGB", (32, 16), "black")
    ImageDraw.Draw(image).rectangle((0, 0, 7, 7), fill="red")
    return image


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "size", "corner"),
    [
        *((1, (32, 16), (4, 4)), (2, (32, 16), (27, 4)), (3, (32, 16), (27, 11)), (4, (32, 16), (4, 11))),
        *((5, (16, 32), (4, 4)), (6, (16, 32), (11, 4)), (7, (16, 32), (11, 27)), (8, (16, 32), (4, 27))),
    ],
)
def test_exif_orientation_is_applied(encoded, file_format, orientation, size, corner):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    picture = decode(encoded(marked(), file_format, exif=exif.tobytes()))
    assert picture.size == size
    red, green, _, _ = picture.getpixel(corner)
    assert (red > 180, green < 90) == (True, True)


def test_broken_exif_is_ignored(encoded):
    assert decode(encoded(marked(), "JPEG", exif=b"Exif\0\0junk" * 9)).size == (32, 16)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_first_frame_of_an_animation(encoded, file_format):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime")]
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], duration=100)
    assert decode(data).getpixel((5, 5))[0] > 240


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_file_is_refused(encoded, file_format, share):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    data = encoded(noise, file_format)
    assert_unreadable(data[: int(len(data) * share)])


def test_large_picture_is_refused_by_its_header(encoded):
    bomb = encoded(Image.new("1", (9000, 9000)))
    assert len(bomb) < 300_000
    assert_refused_unread(bomb)


@pytest.mark.parametrize("side", [20_000, 60_000, 2**31 - 1])
def test_header_that_claims_a_huge_picture_is_refused_by_it(side):
    assert_refused_unread(raw_png(side, side, 8, 2, b""))


def assert_refused_unread(data):
    """Without memory for the picture."""
    tracemalloc.start()
    try:
        assert assert_unreadable(data) == "image_too_large"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
def test_pixel_limit_is_exact(encoded, file_format):
    data = encoded(Image.new("RGB", (40, 30)), file_format)
    decode(data, 1200)
    assert assert_unreadable(data, 1199) == "image_too_large"


def test_strip_is_refused(encoded):
    assert decode(encoded(Image.new("L", (400, 20)))).size == (400, 20)
    assert_unreadable(encoded(Image.new("L", (401, 20))))
    assert_unreadable(encoded(Image.new("L", (20, 401))))


def test_text_bomb_in_png_is_refused_or_ignored(encoded):
    info = PngImagePlugin.PngInfo()
    info.add_text("k", "a" * 50_000_000, zip=True)
    assert_unreadable(encoded(Image.new("L", (9, 9)), pnginfo=info))


def test_metadata_and_trailing_bytes_are_left_behind(encoded):
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "canary")
    picture = decode(encoded(Image.new("RGB", (9, 9)), pnginfo=info, icc_profile=b"canary") + b"canary")
    file = io.BytesIO()
    picture.save(file, "PNG")  # it would write whatever the picture still carries
    assert b"canary" not in file.getvalue()
    assert not picture.info


def test_progressive_scans_are_counted_before_decoding(encoded):
    file = encoded(Image.effect_noise((64, 64), 50), "JPEG", progressive=True)
    assert decode(file).size == (64, 64)
    last_scan = file[file.rindex(b"\xff\xda") : -2]
    with pytest.raises(ApiError) as caught:
        decode(file[:-2] + 2000 * last_scan + file[-2:])
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("depth", "colour", "rows", "key", "alphas"),
    [
        (2, 0, b"\0\x1b", b"\0\1", [255, 0, 255, 255]),
        (4, 0, b"\0\x05\x5f", b"\0\5", [255, 0, 0, 255]),
        (16, 2, b"\0" + struct.pack(">12H", *([0x1234] * 3), *([1] * 3), *([0x80FF] * 3), *([0xFFFF] * 3)),
         struct.pack(">3H", 0x80FF, 0x80FF, 0x80FF), [255, 255, 0, 255]),
    ],
)  # fmt: skip
def test_one_transparent_colour_at_every_depth(depth, colour, rows, key, alphas):
    picture = decode(raw_png(4, 1, depth, colour, rows, chunk(b"tRNS", key)))
    assert [picture.getpixel((x, 0))[3] for x in range(4)] == alphas


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow's remarks about what it could mend
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), file_format=st.sampled_from(["PNG", "JPEG", "WEBP"]))
def test_damaged_file_is_read_or_refused_but_never_crashes(encoded, data, file_format):
    file = bytearray(encoded(marked(), file_format, exif=Image.Exif().tobytes()))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(file), 1_000_000)
    except ApiError as error:
        assert error.status == 400


def test_transparent_pixels_keep_their_colour():
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[..., 0] = 200
    for output_format in ("png", "webp"):
        file = encode(pixels, output_format, "transparent", 100)
        assert file.transparent
        assert abs(Image.open(io.BytesIO(file.data)).getpixel((4, 4))[0] - 200) <= 4


def test_flattening_is_on_white_and_rounds():
    pixels = np.array([[[0, 100, 255, 0], [0, 100, 255, 255], [0, 100, 255, 128]]], np.uint8)
    image = Image.open(io.BytesIO(encode(pixels, "png", "opaque", 100).data))
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image)[0].astype(int) - [[255] * 3, [0, 100, 255], [127, 177, 255]]).max() <= 1
