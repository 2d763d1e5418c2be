"""`easel serve`: the application under uvicorn, from an open port to a drained queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from app.settings import Settings
from engine.errors import EngineError
from models.errors import CheckpointError

if TYPE_CHECKING:
    from engine.engine import Engine

KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which common proxies drop an idle connection
CLOSING_SECONDS = 10  # after the drain, for answers to reach their clients
MAX_HEADER_BYTES = 64 * 1024

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Drains while connections are still open. uvicorn alone would wait for them first, and tell the application only
    when they are gone; so a request that outlives the drain gets its error, not a broken connection."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self.engine = engine
        self.drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self.engine.stop(self.drain_seconds))
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then drain. A service that can't start ends in `SystemExit` with the reason."""
    # uvicorn drains on either signal and raises it once more at the end, which must not look like a failure.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    listener = listen(settings.host, settings.port)
    from app.main import create_app  # brings torch: a busy port shows sooner

    try:
        app = create_app(settings)
    except (EngineError, CheckpointError) as error:
        raise SystemExit(f"easel: the model could not be loaded: {error}") from error
    config = uvicorn.Config(
        app,
        http="h11",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        lifespan="on",
        log_config=None,
        log_level=settings.log_level,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds) + CLOSING_SECONDS,
    )
    server = Server(config, app.state.engine, settings.drain_seconds)

    def stop_server() -> None:
        server.should_exit = True

    app.state.stop_server = stop_server
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if app.state.startup_error:
        raise SystemExit(f"easel: the model could not be loaded: {app.state.startup_error}")
    if not server.started:
        raise SystemExit("easel: the service could not start; its log says why")


def listen(host: str, port: int) -> socket.socket:
    """Take the port. Clients that come before the service is up wait instead of being refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise SystemExit(f"easel: can't listen on {host} port {port}: {error.strerror or error}") from error
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, listener.getsockname()[1])
    return listener
