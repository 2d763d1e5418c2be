"""What is logged: valid JSON lines whatever happens, ids and lengths, and nothing that could forge a line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.logs import configure, load_logged
from tests.server import serving


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave logging as the other tests know it."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    logging.captureWarnings(False)  # whatever ran before: a second call for the same does nothing
    yield
    root.handlers[:], level, sys.excepthook, threading.excepthook = before
    root.setLevel(level)
    logging.captureWarnings(False)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_kind_of_record_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    logging.getLogger("uvicorn.error").warning("told by %s", "another\nlibrary \x1b[31m\u2028")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    try:
        raise ValueError("broken")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    thread = threading.Thread(target=lambda: [][0])
    thread.start()
    thread.join()
    logging.debug("not this")
    text = capsys.readouterr().err
    told, warned, uncaught, in_thread = lines(text)
    assert "\x1b" not in text and text.isascii()
    assert told["event"] == "told by another\nlibrary \x1b[31m\u2028"
    assert (told["level"], told["logger"]) == ("warning", "uvicorn.error") and "timestamp" in told
    assert "DeprecationWarning" in warned["event"]
    assert "ValueError: broken" in uncaught["exception"] and uncaught["level"] == "critical"
    assert "IndexError" in in_thread["exception"]


def test_text_is_one_line_a_record_and_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "text")
    logging.getLogger("easel").info("one\nforged \x1b[31m", extra={"size": "a\rb"})
    try:
        raise ValueError("bell \x07")
    except ValueError:
        logging.getLogger("easel").exception("broken")
    first, second, *traceback = capsys.readouterr().err.split("\n")
    assert first.endswith(r"INFO easel: one\x0aforged \x1b[31m size=a\x0db")
    assert second.endswith("ERROR easel: broken")
    assert traceback[-2] == r"ValueError: bell \x07"


def test_a_worker_is_set_up_before_it_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_logged("info", "json", lambda: logging.getLogger("worker").info("loading") or 7) == 7
    assert lines(capsys.readouterr().err)[0]["event"] == "loading"


def test_a_running_service_logs_json_alone(checkpoint: Path, tmp_path: Path) -> None:
    """From its first line to its last, its worker and bad requests included, without a word of a client's."""
    with serving(checkpoint, tmp_path, "--log-format", "json", "--api-key", "canary-key") as server:
        headers = {"authorization": "Bearer canary-key", "x-request-id": "mine-1"}
        with httpx.Client(base_url=server.url, headers=headers) as client:
            order = {"prompt": "canary-prompt", "size": "64x64", "num_inference_steps": 1}
            assert client.post("/v1/images/generations", json=order).status_code == 200
            client.get("/canary-path%0Aforged?canary=query")
            client.post("/v1/images/generations", content=b"{canary-body", headers={"x-request-id": "canary\tid"})
        assert server.stop() == 0
        records = lines(server.log)
    assert "canary" not in server.log
    answered = [record for record in records if record["event"] == "answered"]
    assert answered[0]["request_id"] == "mine-1" and answered[0]["route"] == "/v1/images/generations"
    assert answered[0]["status"] == 200 and answered[0]["received_bytes"] > 0 and answered[0]["sent_bytes"] > 1000
    assert [record["status"] for record in answered] == [200, 404, 415] and answered[1]["route"] is None
    assert any(record["logger"].startswith("models.") for record in records), "the worker's"


def test_the_reason_of_a_failed_start_is_json_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app", "serve", str(tmp_path), "--port", "0", "--log-format", "json"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert lines(ended.stderr)[-1]["level"] == "critical"
