"""What holds for every route: the request id, the keys, the pages that may call, the size of a body, and an answer
when all else fails.

Pure ASGI: Starlette's `BaseHTTPMiddleware` hides a client's disconnect from the routes, and a picture that nobody
waits for would then be drawn to its end.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError, internal_error, payload_too_large, too_many_bodies, too_slow

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MIN_RATE = 8 * 1024  # bytes a second, in either direction
BUSY_RETRY_S = 2.0  # about what a large body takes to arrive and be prepared
PROBES = frozenset({"/health", "/health/live", "/health/ready", "/v1/health"})
BASIC_CHALLENGE = 'Basic realm="Easel, API key as password", charset="UTF-8"'


class RequestContext:
    """Outermost: gives the request its id and names it in every answer.

    The id is the client's own where that is safe to log and to put in a path. Routes read it with `request_id_of`.
    While `is_closing`, an answer ends its connection: nobody should send the next request into one that is about to
    be closed.
    """

    def __init__(self, app: ASGIApp, is_closing: Callable[[], bool] = lambda: False) -> None:
        self.app = app
        self.is_closing = is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        own_id = Headers(scope=scope).get("x-request-id", "")
        request_id = own_id if REQUEST_ID.fullmatch(own_id) else new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)  # in every record of this request's task
        started_s, received, sent, status = time.perf_counter(), 0, 0, 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal sent, status
            sent += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if self.is_closing():
                    headers["connection"] = "close"
            await send(message)

        try:
            await self.app(scope, counted_receive, send_with_id)
        finally:
            log_answer(scope, status, time.perf_counter() - started_s, received, sent)


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def log_answer(scope: Scope, status: int, seconds: float, received: int, sent: int) -> None:
    """One record for each answer; of its path, only the pattern of the route that took it. Status 0: nobody waited."""
    quiet = scope["path"] in PROBES or scope["path"] == "/metrics"
    logger.log(
        logging.DEBUG if quiet else logging.INFO,
        "answered",
        extra={
            "method": scope["method"] if scope["method"] in METHODS else "other",
            "route": getattr(scope.get("route"), "path", None),
            "status": status,
            "seconds": round(seconds, 3),
            "received_bytes": received,
            "sent_bytes": sent,
        },
    )


def request_id_of(scope: Scope) -> str:
    """The id that `RequestContext` gave to this request."""
    request_id: str = scope["state"]["request_id"]
    return request_id


class CrossOrigin(CORSMiddleware):
    """Lets the pages of some origins call every route. It answers what a browser asks beforehand, which has no key."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        super().__init__(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "retry-after-ms", "x-easel-seed", "x-easel-warnings"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        message = "Pages of this origin may not call this service in this way."
        return ApiError(400, message, code="origin_not_allowed").response()


class ForeignForms:
    """Refuses what a page of another site makes a browser post, unless the page's origin may call.

    A form, unlike a script, needs no permission of ours: any page that somebody looks at could make a service on the
    same machine draw. Browsers say where a request comes from, where it goes to https or to the same machine; other
    clients do not, and are not asked.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        self.app = app
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or self.admits(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        message = "Pages of other sites may not make a browser send this."
        await ApiError(403, message, code="origin_not_allowed").response()(scope, receive, send)

    def admits(self, headers: Headers) -> bool:
        from_elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        return not from_elsewhere or "*" in self.origins or headers.get("origin") in self.origins


class UnforeseenErrors:
    """Turns an exception that nothing expects into a 500, inside of what puts headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception:  # a bug of ours: the client learns the id to report, the log gets the rest
            logger.exception("unhandled error", extra={"request_id": request_id_of(scope)})
            if started:
                raise  # half an answer is out: only closing the connection can tell
            await internal_error().response()(scope, receive, send)


class Authentication:
    """Asks for one of `keys` on every path but `open_paths`, unknown paths included. A path and its query for which
    `admits_link` holds are a permission in themselves.

    Clients send a key as a bearer token. A browser that is to show a page is asked for Basic credentials instead: it
    has a form for them, in which the key goes into either field, and sends them with whatever the page asks for.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        open_paths: Collection[str] = PROBES,
        admits_link: Callable[[str, str], bool] = lambda path, query: False,
    ) -> None:
        self.app = app
        self.admits_link = admits_link
        self.open_paths = frozenset(open_paths)
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open_paths or self.admits(scope):
            await self.app(scope, receive, send)
            return
        shows_pages = "text/html" in Headers(scope=scope).get("accept", "")
        error = ApiError(
            401,
            "Missing or incorrect API key. Send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"www-authenticate": BASIC_CHALLENGE if shows_pages else "Bearer"},
        )
        await error.response()(scope, receive, send)

    def admits(self, scope: Scope) -> bool:
        if self.admits_link(scope["path"], scope["query_string"].decode("latin-1")):
            return True
        given = given_key(scope["method"], Headers(scope=scope))
        matches = [hmac.compare_digest(given, key) for key in self.keys]  # all of them: no early way out to time
        return any(matches)


def given_key(method: str, headers: Headers) -> bytes:
    """The key that a request carries, empty if none.

    A browser sends Basic credentials of its own accord, with a form that another site makes it post, too. Such a form
    can't have headers of its own: what is posted must name its id, as the playground does.
    """
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    given = credentials.strip().encode("latin-1")
    match scheme.lower():
        case "bearer":
            return given
        case "basic" if method != "POST" or "x-request-id" in headers:
            with contextlib.suppress(binascii.Error):
                name, _, password = base64.b64decode(given, validate=True).partition(b":")
                return password or name
    return b""


class BodyLimit:
    """Raises 413 inside the route once a body is known to be over `max_bytes`, whether it has a length or not, and
    408 once it was waited for longer than `patience_s` and what `MIN_RATE` allows for its bytes so far.

    429 is for the body with which those of all requests, from their first byte to the end of their answers, would be
    over `max_total_bytes`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int, patience_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_total_bytes = max_total_bytes
        self.patience_s = patience_s
        self.total_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_large = payload_too_large(f"The body is larger than {self.max_bytes} bytes.")
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isascii() and declared.isdigit() and len(declared) < 20:
            if int(declared) > self.max_bytes:
                await too_large.response()(scope, receive, send)
                return
            if int(declared) + self.total_bytes > self.max_total_bytes:
                await too_many_bodies(BUSY_RETRY_S).response()(scope, receive, send)
                return
        received, waited_s, is_complete = 0, 0.0, False

        async def limited_receive() -> Message:
            nonlocal received, waited_s, is_complete
            if is_complete:  # what comes now is the end of the connection, whenever that is
                return await receive()
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(self.patience_s + received / MIN_RATE - waited_s):
                    message = await receive()
            except TimeoutError:
                raise too_slow("The body") from None
            waited_s += time.monotonic() - began_s
            num_bytes = len(message.get("body", b""))
            if received + num_bytes > self.max_bytes:
                raise too_large
            if self.total_bytes + num_bytes > self.max_total_bytes:
                raise too_many_bodies(BUSY_RETRY_S)
            received += num_bytes
            self.total_bytes += num_bytes
            is_complete = not message.get("more_body", False)
            return message

        try:
            await self.app(scope, limited_receive, send)
        finally:
            self.total_bytes -= received
