"""Reading of bodies: what kind they are, how long they may be, and their JSON without its pictures.

Parsing JSON holds the interpreter's lock, and so everybody up, for as long as the body is. So the long data URLs are
lifted out first, by searches that run at the speed of memory; each leaves a mark behind, and its text is not copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from app.errors import payload_too_large, unsupported_media_type

JSON, FORM = "application/json", "multipart/form-data"
MAX_TEXT_BYTES = 16 * 2**20  # of a body that holds texts and no pictures

URL_START = b'"data:'
MIN_LIFTED_CHARS = 65_536  # longer than any text that is taken, so what is lifted is a picture or an error
MARK = "data:\0"  # no text may hold a NUL


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON text, and the data URLs for which its marks, `MARK` and a number, stand."""

    text: bytes
    lifted: tuple[memoryview, ...] = ()


def media_type_of(request: Request, *expected: str) -> str:
    """Which of the `expected` types the body has. Raises 415 for another one, or one that has to be unpacked first.

    A header that comes twice counts as the list of both, as HTTP has it, so none can hide behind another.
    """
    types, codings = (request.headers.getlist(name) for name in ("content-type", "content-encoding"))
    media_type = types[0].partition(";")[0].strip().lower() if len(types) == 1 else ""
    if media_type not in expected:
        choice = " or ".join(f"'{name}'" for name in expected)
        raise unsupported_media_type(f"This route takes {choice}: set the content-type header.")
    if any(coding.strip().lower() != "identity" for coding in codings):
        raise unsupported_media_type("Compressed bodies are not taken: leave out the content-encoding header.")
    return media_type


async def read_body(request: Request, max_bytes: int) -> bytearray:
    """The body, if it is no longer than any that could make sense."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise payload_too_large(f"A JSON body may have {max_bytes} bytes.")
    return body


def lift_urls(body: bytearray) -> JsonBody:
    """Take the long data URLs out of a JSON text; those with escapes in them stay."""
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    lifted: list[memoryview] = []
    copied = position = 0
    while (quote := body.find(URL_START, position)) >= 0:
        end = body.find(b'"', quote + 1)
        position = quote + len(URL_START) if end < 0 else end
        starts_string = quote == 0 or body[quote - 1] != ord("\\")
        if end - quote > MIN_LIFTED_CHARS and starts_string and body.find(b"\\", quote, end) < 0:
            pieces += [view[copied : quote + 1], f"data:\\u0000{len(lifted)}".encode()]
            lifted.append(view[quote + 1 : end])
            copied = end
    return JsonBody(b"".join([*pieces, view[copied:]]), tuple(lifted))
