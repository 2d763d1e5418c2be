"""HTTP on a connection, where the server answers by itself: what is no HTTP has no route to answer it."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.errors import invalid
from app.middleware import new_request_id


class Protocol(H11Protocol):
    """Refuses malformed requests in the envelope that every other error has."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else the answer to a request is under way
            body = bytes(invalid("The request is not valid HTTP.", code="invalid_http").response().body)
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                ("x-request-id", new_request_id()),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
