"""The application under uvicorn, from an open port to a drained queue."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from app.logs import LogFormat
from app.main import create_app
from app.protocol import Protocol
from app.settings import Settings
from engine.engine import Engine

KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which common proxies drop an idle connection
CLOSING_SECONDS = 10  # after the drain, for answers to reach their clients
MAX_HEADER_BYTES = 64 * 1024
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Drains while the port is still open, then closes it; the second signal ends the process at once.

    uvicorn alone would close the port first, so that new clients meet a broken connection instead of a 503, then wait
    for connections, and tell the application only when they are gone.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, log_format: LogFormat) -> None:
        super().__init__(config)
        self.app = app
        self.log_format = log_format

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and end the process: nothing is left to do then, but threads that still import or fetch, and a large
        heap to take apart, can hold up a normal exit for longer than whoever asked for it waits."""
        await super().serve(sockets)
        reason = self.app.state.failure and " ".join(self.app.state.failure.split())  # one line, whatever it quotes
        if not self.started:
            reason = "the service could not start; its log says why"
        if reason:
            last_words(reason, self.log_format)
        os._exit(1 if reason else 0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("draining; a second signal ends the service at once")
        await self.app.state.drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals and keep them to the end: the second one may come late."""
        for number in STOP_SIGNALS:
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; or, the second time, end now and take the worker along."""
        if self.should_exit:
            if worker_pid := self.app.state.engine.worker_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker_pid, signal.SIGKILL)
            os._exit(128 + sig)
        self.should_exit = True


def last_words(reason: str, log_format: LogFormat) -> None:
    """Why the process ends, as the last thing on standard error."""
    if log_format == "json":
        logger.critical("%s", reason)
    else:
        with contextlib.suppress(OSError):  # of a full disk the exit status tells
            print(f"easel: {reason}", file=sys.stderr)


def serve(settings: Settings, engine: Engine, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, drain, and end the process: status 0, or 1 and the reason on standard error."""
    app = create_app(settings, engine)
    config = uvicorn.Config(
        app,
        http=Protocol.waiting(settings.request_seconds, settings.answer_seconds),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        lifespan="on",
        log_config=None,
        access_log=False,  # RequestContext writes one line for each answer, without what clients put into paths
        log_level=settings.log_level,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    server = Server(config, app, settings.log_format)

    def stop_server() -> None:
        server.should_exit = True

    app.state.stop_server = stop_server
    gc.freeze()  # what is here stays: no collection, which stops the event loop, need look at it again
    server.run(sockets=[listener])
