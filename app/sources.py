"""The ways in which a picture comes to an endpoint: as a file, in a data URL, or behind a link.

What a URL declares decides only whether it is looked at; what the picture is, its content says (`app.images`). Data
URLs are decoded as late as files are: in a thread, once their request has its place.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import pybase64

from app.bodies import MARK
from app.errors import ApiError, invalid, payload_too_large
from app.links import Links

DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*?)(;base64)?,", re.IGNORECASE)
MAX_PREFIX_CHARS = 256
IMAGE_TYPE = re.compile(r"(image/(?!svg)[a-z0-9.+-]+|application/octet-stream|)", re.IGNORECASE)
WHITESPACE = b" \t\r\n"
MAX_EXPANSION = 1.5  # base64 in lines takes 1.38 times the bytes


@dataclass(frozen=True, slots=True)
class DataUrl:
    """The base64 text of a picture, not yet decoded: ASCII, or whatever a client takes for it."""

    encoded: str | memoryview
    param: str

    def read(self, max_bytes: int) -> bytes:
        """Decode it. Raises `ApiError`: 413 over `max_bytes`, 400 for what is not base64."""
        if len(self.encoded) > MAX_EXPANSION * max_bytes + MAX_PREFIX_CHARS:
            raise self._too_large(max_bytes)
        encoded: bytes | memoryview | str = self.encoded
        try:
            if isinstance(encoded, str):
                encoded = encoded.encode("ascii").translate(None, WHITESPACE)
            decoded = pybase64.b64decode(encoded, validate=True)
        except (UnicodeEncodeError, binascii.Error) as error:
            raise invalid("An image's data URL is not valid base64.", param=self.param, code="invalid_image") from error
        if len(decoded) > max_bytes:
            raise self._too_large(max_bytes)
        return decoded

    def _too_large(self, max_bytes: int) -> Exception:
        return payload_too_large(f"An image file is larger than {max_bytes} bytes.", param=self.param)


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """A picture that is somewhere else."""

    url: str
    param: str


ImageSource = bytes | DataUrl | RemoteImage


def source_of(url: str, *, param: str, lifted: Sequence[memoryview] = ()) -> DataUrl | RemoteImage:
    """What a client's URL, or the mark of one that was `lifted` out of its body, stands for. Raises `ApiError` for
    anything but a data URL of an image and http(s)."""
    number = url.removeprefix(MARK)
    if number != url and number.isdecimal() and len(number) < 4 and int(number) < len(lifted):
        view = lifted[int(number)]
        start = base64_start(bytes(view[:MAX_PREFIX_CHARS]).decode("latin-1"), param)
        return DataUrl(view[start:], param)
    scheme = url[:MAX_PREFIX_CHARS].partition(":")[0].lower()
    if scheme in ("http", "https"):
        return RemoteImage(url, param)
    if scheme != "data":
        message = "An image URL must be a data URL, or start with http:// or https://."
        raise invalid(message, param=param, code="invalid_image_url")
    return DataUrl(url[base64_start(url[:MAX_PREFIX_CHARS], param) :], param)


def base64_start(head: str, param: str) -> int:
    """Where the base64 begins in a data URL of an image that begins with `head`."""
    match = DATA_URL.match(head)
    if match is None or not match[3]:
        message = "A data URL must have the form data:image/png;base64,…"
        raise invalid(message, param=param, code="invalid_image_url")
    if not IMAGE_TYPE.fullmatch(match[1].strip()):
        message = "A data URL must hold a PNG, JPEG or WebP image."
        raise invalid(message, param=param, code="invalid_image_url")
    return match.end()


def url_not_allowed(param: str) -> ApiError:
    message = "Images are not fetched from this URL: send the file, or a data URL."
    return invalid(message, param=param, code="url_not_allowed")


def without_own_links(sources: Sequence[ImageSource], links: Links) -> list[ImageSource]:
    """The sources with the pictures behind links of this service in place of the links: these need no fetching."""
    own = [linked_file(source.url, links) if isinstance(source, RemoteImage) else None for source in sources]
    return [source if file is None else file for source, file in zip(sources, own, strict=True)]


def linked_file(url: str, links: Links) -> bytes | None:
    """The picture behind a link that this service has made, as long as it is good."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if not links.admits(parts.path, parts.query):
        return None
    file = links.open(parts.path.rpartition("/")[2])
    return None if file is None else file.data
