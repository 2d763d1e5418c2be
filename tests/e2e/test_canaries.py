"""What clients send stays between them and the service: marked prompts, pictures, names and keys turn up in no log, no
figure and no error, whatever goes wrong meanwhile. And a stream goes on over the death of the worker that drew it."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.server import START_TIMEOUT_S, Server, serving

CANARY = "c4n4ry"
KEY = f"{CANARY}-key"
GENERATIONS, EDITS, CHAT = "/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"
SMALL = {"size": "64x64", "num_inference_steps": 2, "seed": 7}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoint, tmp_path_factory.mktemp("server"), "--api-key", KEY, "--log-level", "debug") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        yield client


def picture() -> bytes:
    notes, file = PngInfo(), io.BytesIO()
    notes.add_text("comment", CANARY)
    Image.new("RGB", (64, 64), "red").save(file, "PNG", pnginfo=notes)
    return file.getvalue() + CANARY.encode()


def kill_a_worker_that_steps(server: Server, client: httpx.Client, request_id: str) -> None:
    """Once the request is at a step."""
    deadline = time.monotonic() + 60
    while client.get(f"/v1/images/requests/{request_id}").json().get("step", 0) < 2:
        assert time.monotonic() < deadline
    os.kill(server.workers()[0], signal.SIGKILL)


def test_canaries_are_found_nowhere(server: Server, client: httpx.Client) -> None:
    data_url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    named = {"image": (f"{CANARY}.png", picture(), "image/png")}
    broken_url = f"data:image/png;base64,{CANARY}!"
    guided = {"negative_prompt": f"{CANARY} no", "true_cfg_scale": 2.0}
    answers = [
        client.post(GENERATIONS, json=SMALL | guided | {"prompt": f"{CANARY} yes", "user": CANARY}),
        client.post(EDITS, data={"prompt": CANARY, "size": "64x64", "num_inference_steps": "1"}, files=named),
        client.post(EDITS, json=SMALL | {"prompt": CANARY, "images": [{"image_url": data_url}]}),
        client.post(EDITS, json={"prompt": CANARY, "images": [{"image_url": broken_url}]}),
        client.post(EDITS, json={"prompt": CANARY, "images": [{"image_url": f"https://{CANARY}.example/"}]}),
        client.post(EDITS, data={"prompt": CANARY}, files={"image": (CANARY, CANARY.encode())}),
        client.post(GENERATIONS, json={"prompt": [CANARY], "seed": CANARY, "size": CANARY}),
        client.post(
            GENERATIONS, content=f'{{"prompt": "{CANARY}'.encode(), headers={"content-type": "application/json"}
        ),
        client.post(GENERATIONS, json={"prompt": CANARY * 10_000}),
        client.post(GENERATIONS, json={"prompt": CANARY}, headers={"authorization": f"Bearer {CANARY}"}),
        client.post(CHAT, json=SMALL | {"messages": [{"role": "user", "content": f"{CANARY} chat"}]}),
        client.get(f"/{CANARY}?{CANARY}={CANARY}"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, *[400] * 6, 401, 200, 404]
    for answer in answers:
        assert CANARY not in str(answer.headers)
        assert CANARY not in answer.text
    for file in (answers[1].json()["data"][0]["b64_json"], answers[2].json()["data"][0]["b64_json"]):
        assert CANARY.encode() not in base64.b64decode(file)
    long = SMALL | {"prompt": f"{CANARY} long", "num_inference_steps": 60, "size": "256x256"}
    for request_id, leaves in (("killed", False), ("left", True)):
        sending = threading.Thread(target=send, args=(server.url, long, request_id, 1.0 if leaves else 120.0))
        sending.start()
        if not leaves:
            kill_a_worker_that_steps(server, client, request_id)
        sending.join()
        assert CANARY not in client.get(f"/v1/images/requests/{request_id}").text
    assert CANARY not in client.get("/metrics").text
    assert "answered" in server.log
    assert CANARY not in server.log


def send(url: str, order: dict[str, Any], request_id: str, timeout_s: float) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": request_id}
    try:
        httpx.post(url + GENERATIONS, json=order, headers=headers, timeout=timeout_s).raise_for_status()
    except httpx.TimeoutException:
        assert request_id == "left"


@pytest.mark.parametrize("path", [GENERATIONS, CHAT])
def test_a_stream_outlives_its_worker(server: Server, client: httpx.Client, path: str) -> None:
    order: dict[str, Any] = {"seed": 3, "num_inference_steps": 40, "size": "192x192", "stream": True}
    if path == CHAT:
        order |= {"messages": [{"role": "user", "content": "a red circle"}]}
    else:
        order |= {"prompt": "a red circle", "partial_images": 2}
    undisturbed = list(events(client, path, order, f"calm-{path[4]}"))
    request_id = f"killed-{path[4]}"
    killer = threading.Thread(target=kill_a_worker_that_steps, args=(server, client, request_id))
    killer.start()
    disturbed = list(events(client, path, order, request_id))
    killer.join()
    deadline = time.monotonic() + START_TIMEOUT_S
    server.wait_until_ready(deadline)
    assert [pictures(event) for event in disturbed] == [pictures(event) for event in undisturbed]
    assert not any("error" in event for event in disturbed)
    assert any(pictures(event) for event in disturbed)


def events(client: httpx.Client, path: str, order: dict[str, Any], request_id: str) -> Iterator[dict[str, Any]]:
    with client.stream("POST", path, json=order, headers={"x-request-id": request_id}, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def pictures(event: dict[str, Any]) -> list[str]:
    """The type of an event and its picture, or what a chunk of chat brings."""
    if "choices" not in event:
        return [event["type"], str(event.get("partial_image_index")), event["b64_json"]]
    return [str(choice["delta"].get("images")) for choice in event["choices"] if choice["delta"].get("images")]
