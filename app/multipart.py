"""A multipart/form-data body, taken apart in memory while it arrives.

Nothing is written to disk, and every limit applies to the bytes seen so far: a fifth image or an oversized file is
refused at that point, not when the body is complete. File names and declared types are ignored, so a part is an image
if its field is called `image` or `url`, in one of the spellings that clients use, and a URL if it reads like one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from app.errors import ApiError, invalid, payload_too_large
from app.sources import MAX_EXPANSION, MAX_PREFIX_CHARS, ImageSource, source_of

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_IMAGES = 4
MAX_PARTS = 100
MAX_FIELD_BYTES = 256 * 2**10  # 32,000 characters of four bytes, and some
MAX_BOUNDARY_CHARS = 70  # RFC 2046, section 5.1.1
UNSUPPORTED_FILES = (b"mask", b"markup")
INDEX = rb"(\[[0-9]{0,3}\])?"
IMAGE_FIELD = re.compile(rb"images?" + INDEX + rb"(\[image_url\])?|(image_)?urls?" + INDEX)
URL = re.compile(rb"\s{0,8}(data|https?):", re.IGNORECASE)  # no picture starts like that


@dataclass(frozen=True, slots=True)
class Form:
    """What a form held: texts by field name, and the images in the order they came."""

    texts: dict[bytes, bytes] = field(default_factory=dict)
    images: list[ImageSource] = field(default_factory=list)


async def read_form(request: Request, *, max_file_bytes: int) -> Form:
    """Read the body of `request`. Raises `ApiError`: 400 for a broken form, 413 for a file over the limit."""
    _, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= MAX_BOUNDARY_CHARS:
        raise invalid(f"The multipart boundary must have 1 to {MAX_BOUNDARY_CHARS} characters.", code="invalid_form")
    collector = FormCollector(max_file_bytes)
    parser = MultipartParser(boundary, collector.callbacks())
    try:
        async for chunk in request.stream():
            parser.write(chunk)
    except FormParserError as error:
        raise invalid("The multipart body is malformed.", code="invalid_form") from error
    if not collector.complete:
        raise invalid("The multipart body ends before its closing boundary.", code="invalid_form")
    return collector.form


def too_many_images(param: str) -> ApiError:
    return invalid(f"At most {MAX_IMAGES} images are taken.", param=param, code="too_many_images")


class FormCollector:
    """Receives the parser's events. One part is open at a time, and joins the form when it ends."""

    def __init__(self, max_file_bytes: int) -> None:
        self.form = Form()
        self.complete = False
        self.max_file_bytes = max_file_bytes
        self.num_parts = 0
        self.header_name, self.header_value = b"", b""
        self.disposition = b""
        self.field_name = b""
        self.content = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self.begin_part,
            "on_header_begin": self.begin_header,
            "on_header_field": self.add_header_name,
            "on_header_value": self.add_header_value,
            "on_header_end": self.end_header,
            "on_headers_finished": self.open_content,
            "on_part_data": self.add_content,
            "on_part_end": self.end_part,
            "on_end": self.end_form,
        }

    @property
    def is_image(self) -> bool:
        return IMAGE_FIELD.fullmatch(self.field_name) is not None

    @property
    def is_url(self) -> bool:
        """Whether the content is an image's URL instead of the image."""
        return b"url" in self.field_name or URL.match(self.content, 0, 16) is not None

    @property
    def max_content_bytes(self) -> float:
        """Past this an image is too large whatever it turns out to be."""
        return self.max_file_bytes * (MAX_EXPANSION if self.is_url else 1) + MAX_PREFIX_CHARS

    def image_source(self) -> ImageSource:
        if self.is_url:
            return source_of(self.content.decode("utf-8", errors="replace").strip(), param="image")
        if len(self.content) > self.max_file_bytes:
            raise self.too_large()
        return bytes(self.content)

    def too_large(self) -> ApiError:
        return payload_too_large(f"An image file is larger than {self.max_file_bytes} bytes.", param="image")

    def begin_part(self) -> None:
        self.num_parts += 1
        if self.num_parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts.", code="invalid_form")
        self.disposition = b""
        self.content = bytearray()

    def begin_header(self) -> None:
        self.header_name, self.header_value = b"", b""

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        self.header_name += data[start:end]

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        self.header_value += data[start:end]

    def end_header(self) -> None:
        if self.header_name.lower() == b"content-disposition":
            self.disposition = self.header_value

    def open_content(self) -> None:
        _, options = parse_options_header(self.disposition)
        self.field_name = options.get(b"name", b"")
        if not self.field_name:
            raise invalid("A part of the form has no field name.", code="invalid_form")
        if self.field_name in UNSUPPORTED_FILES:
            name = self.field_name.decode()
            raise invalid(f"'{name}' is not supported.", param=name, code="unsupported_parameter")
        if self.is_image and len(self.form.images) == MAX_IMAGES:
            raise too_many_images("image")
        if not self.is_image and self.field_name in self.form.texts:
            raise invalid("A field is given more than once.", param=self.field_name.decode("latin-1"))

    def add_content(self, data: bytes, start: int, end: int) -> None:
        self.content += data[start:end]
        if self.is_image and len(self.content) > self.max_content_bytes:
            raise self.too_large()
        if not self.is_image and len(self.content) > MAX_FIELD_BYTES:
            name = self.field_name.decode("latin-1")
            raise invalid(f"A field is longer than {MAX_FIELD_BYTES} bytes.", param=name)

    def end_part(self) -> None:
        if self.is_image:
            self.form.images.append(self.image_source())
        else:
            self.form.texts[self.field_name] = bytes(self.content)

    def end_form(self) -> None:
        self.complete = True
