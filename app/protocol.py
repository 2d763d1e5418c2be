"""HTTP on a connection, where the server acts by itself: what is no HTTP, or never becomes a request, has no route to
answer it, and a client that does not read its answer would keep it here for ever."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.errors import ApiError, invalid, too_slow
from app.middleware import MIN_RATE, new_request_id


class Protocol(H11Protocol):
    """Refuses malformed requests in the envelope that every other error has, and does not wait for ever for the head of
    one: `head_seconds` from when the connection is made, or from the first byte behind an earlier answer.

    Nor for its answer to be taken: a client that in `answer_seconds` takes neither `MIN_RATE` bytes a second nor all
    that is left is cut off. To the route it has disconnected.
    """

    head_seconds: float = 10.0
    answer_seconds: float = 60.0
    _waiting: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None

    @classmethod
    def waiting(cls, head_seconds: float, answer_seconds: float) -> type[Protocol]:
        """This protocol with another patience."""
        return type("Protocol", (cls,), {"head_seconds": head_seconds, "answer_seconds": answer_seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that writing is paused whenever something is left to be taken
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _expect_progress(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.answer_seconds, self._judge_progress, unsent_bytes)

    def _judge_progress(self, before_bytes: int) -> None:
        if before_bytes - self.transport.get_write_buffer_size() < MIN_RATE * self.answer_seconds:
            self.transport.abort()
        else:
            self._expect_progress()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._relax()
        self.resume_writing()

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
