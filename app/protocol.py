"""HTTP on a connection, where the server answers by itself: what is no HTTP, or never becomes a request, has no route
to answer it."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.errors import ApiError, invalid, too_slow
from app.middleware import new_request_id


class Protocol(H11Protocol):
    """Refuses malformed requests in the envelope that every other error has, and does not wait for ever for the head of
    one: `head_seconds` from when the connection is made, or from the first byte behind an earlier answer."""

    head_seconds: float = 10.0
    _waiting: asyncio.TimerHandle | None = None

    @classmethod
    def waiting(cls, seconds: float) -> type[Protocol]:
        """This protocol with another patience."""
        return type("Protocol", (cls,), {"head_seconds": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._relax()

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid("The request is not valid HTTP.", code="invalid_http"))

    def _watch(self) -> None:
        is_answered = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing() or not is_answered or self.conn.their_state is not h11.IDLE:
            self._relax()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.head_seconds, self._refuse, too_slow("The request"))

    def _relax(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else the answer to a request is under way
            body = bytes(error.response().body)
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                ("x-request-id", new_request_id()),
            ]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
