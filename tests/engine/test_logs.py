"""A log in JSON stays one object a line, whatever is in it."""

from __future__ import annotations

import json
import logging

from engine.logs import JsonLines


def line_of(message: str, *args: object, **extra: object) -> str:
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": message, "args": args, **extra})
    return JsonLines().format(record)


def test_nothing_breaks_a_line() -> None:
    hostile = 'a\r\nb\x00\x1b[31m\u2028"\\\ud800'
    line = line_of("GET %s", hostile, request_id=hostile)
    assert line.isascii() and line.isprintable()
    assert json.loads(line) | {"time": ""} == {
        "time": "",
        "level": "info",
        "logger": "a",
        "message": "GET " + hostile,
        "request_id": hostile,
    }


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        line = line_of("failed", exc_info=(ValueError, error, error.__traceback__))
    assert "\n" not in line
    assert "Traceback" in json.loads(line)["exception"]
