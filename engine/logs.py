"""How the service and its worker write their logs: text for people, or one JSON object a line for machines.

A log holds what clients send in places, a path for one. As JSON everything is escaped, so no client can begin a line
or move a terminal's cursor.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = "info"
    as_json: bool = False


AS_TEXT = LogConfig()


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if "request_id" in record.__dict__:
            line["request_id"] = record.__dict__["request_id"]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(config: LogConfig) -> None:
    """Make this process log as `config` says, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.as_json else logging.Formatter(TEXT))
    logging.basicConfig(level=config.level.upper(), handlers=[handler])
