"""`easel serve`, until the web framework is there: take the port and let the worker begin.

Importing the framework takes a second, and importing torch, in the worker, several. So the worker comes first, and this
module imports neither. Clients that come meanwhile wait at the open port.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from functools import partial

from app.logs import load_logged
from app.settings import Settings
from engine.engine import Engine
from engine.loading import load_runner

MAX_UNSENT_BYTES = 128 * 1024  # that the kernel takes of an answer and has not sent

logger = logging.getLogger(__name__)


def launch(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, drain, and end the process: status 0, or 1 and the reason on standard error."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))  # until there is something to drain
    listener = listen(settings.host, settings.port)
    engine = make_engine(settings)
    try:
        engine.launch()
    except OSError as error:
        raise SystemExit(f"easel: the worker can't be started: {error}") from error
    from app.server import serve

    serve(settings, engine, listener)


def listen(host: str, port: int) -> socket.socket:
    """Take the port. Clients that come before the service is up wait instead of being refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        # asyncio does this only for sockets that name their protocol. Without it the second packet of an answer waits
        # for the client to acknowledge the first, which takes 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # what a client does not take stays here, where it is watched
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    except OSError as error:
        raise SystemExit(f"easel: can't listen on {host} port {port}: {error.strerror or error}") from error
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, listener.getsockname()[1])
    return listener


def make_engine(settings: Settings) -> Engine:
    """The engine that the settings ask for. Its worker logs like this process."""
    config = settings.engine_config()
    load = partial(load_logged, settings.log_level, settings.log_format, partial(load_runner, config))
    return Engine(config, load=load)
