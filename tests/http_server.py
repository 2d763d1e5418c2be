"""A small HTTP server for what the project asks of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address at which `handler` answers, without a word on standard error."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
