"""Reading of bodies: what kind they are, how long they may be, and their JSON."""

from __future__ import annotations

from starlette.requests import Request

from app.errors import payload_too_large, unsupported_media_type

JSON, FORM = "application/json", "multipart/form-data"
MAX_TEXT_BYTES = 16 * 2**20  # of a body that holds texts and no pictures


def media_type_of(request: Request, *expected: str) -> str:
    """Which of the `expected` types the body has. Raises 415 for another one, or one that has to be unpacked first."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in expected:
        choice = " or ".join(f"'{name}'" for name in expected)
        raise unsupported_media_type(f"This route takes {choice}: set the content-type header.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise unsupported_media_type("Compressed bodies are not taken: leave out the content-encoding header.")
    return media_type


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, if it is no longer than any that could make sense."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise payload_too_large(f"A JSON body may have {max_bytes} bytes.")
    return bytes(body)
