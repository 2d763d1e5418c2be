"""Server-sent events: an answer that is sent while it is being made.

What is wrong with a request is an ordinary HTTP error as long as nothing has been sent. From then on it is an event.
A client that leaves ends the answer, and whatever it was made from, at once, not at the next thing to send.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.disconnect import unless_disconnected
from app.errors import ApiError, ErrorBody, from_engine, internal_error
from app.metrics import Counting
from engine.errors import EngineError

logger = logging.getLogger(__name__)

KEEPALIVE = b": keepalive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nginx would hold events back


def event(kind: str, data: BaseModel) -> bytes:
    """One event. Its absent fields are left out."""
    return b"".join((b"event: ", kind.encode(), b"\ndata: ", to_json(data, exclude_none=True), b"\n\n"))


def data_line(data: BaseModel) -> bytes:
    """One event without a name."""
    return b"".join((b"data: ", to_json(data), b"\n\n"))


def error_event(error: ApiError) -> bytes:
    body = ErrorBody(error=error.detail).model_dump_json().removeprefix("{")
    return f'event: error\ndata: {{"type":"error",{body}\n\n'.encode()


class EventStream(Response):
    """Sends `chunks`, then calls `close`, in whatever way it ends. `counting` has been postponed to here."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes], close: Callable[[], Awaitable[None]], counting: Counting) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._chunks, self._close, self._counting = chunks, close, counting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            return
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            with self._counting:
                async with aclosing(self._chunks) as chunks:
                    async for chunk in chunks:
                        await send_body(send, chunk)
        except ClientDisconnect:
            raise
        except EngineError as error:
            await send_body(send, error_event(from_engine(error)))
        except ApiError as error:
            await send_body(send, error_event(error))
        except Exception:  # a bug of ours, of which the status line can no longer tell
            logger.exception("unhandled error in a stream")
            await send_body(send, error_event(internal_error()))
        await send_body(send, b"", more_body=False)


async def send_body(send: Send, body: bytes, *, more_body: bool = True) -> None:
    try:
        await send({"type": "http.response.body", "body": body, "more_body": more_body})
    except OSError as error:  # what some servers raise when the client has gone
        raise ClientDisconnect from error
