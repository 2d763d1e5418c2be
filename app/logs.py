"""Logs on standard error: one JSON object a line for a collector, or a line of text for a person.

Everything goes through the root logger: ours, uvicorn's, warnings, uncaught exceptions, and the worker's, which sets
itself up by `load_logged`. Records carry the id of the request they belong to, and lengths; never what a client wrote.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, TypeVar

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["json", "text"]
T = TypeVar("T")

CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
FROM_EXCEPTIONS = {code: escape for code, escape in CONTROL_CHARACTERS.items() if chr(code) not in "\n\t"}

logger = logging.getLogger(__name__)


def configure(level: str, log_format: LogFormat) -> None:
    """Send every record of this process to standard error. The last call counts."""
    processors: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=True)]
    else:
        processors += [structlog.processors.format_exc_info, as_text]
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=processors,
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            without_colours,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = log_uncaught
    threading.excepthook = lambda args: log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def load_logged(level: str, log_format: LogFormat, load: Callable[[], T]) -> T:
    """What `load` returns, in a process that has yet to be set up: the worker's."""
    configure(level, log_format)
    return load()


def without_colours(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """uvicorn attaches its messages a second time, for terminals."""
    event.pop("color_message", None)
    return event


def as_text(_: WrappedLogger, method: str, event: EventDict) -> str:
    """`time LEVEL logger: message key=value`, in one line, and an exception's traceback under it."""
    time, level, name = event.pop("timestamp"), str(event.pop("level")).upper(), event.pop("logger")
    exception = event.pop("exception", None)
    message = event.pop("event")
    fields = "".join(f" {key}={value}" for key, value in event.items())
    line = f"{time} {level} {name}: {message}{fields}".translate(CONTROL_CHARACTERS)
    return line if exception is None else f"{line}\n{str(exception).translate(FROM_EXCEPTIONS)}"


def log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    """For an exception that ends its thread, or the process."""
    if issubclass(kind, KeyboardInterrupt) or error is None:
        sys.__excepthook__(kind, error or kind(), traceback)
        return
    logger.critical("uncaught exception", exc_info=(kind, error, traceback))
