"""Pictures as server-sent events: the shapes, the order, and the ways in which a stream can end."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import pytest
from PIL import Image

from engine.errors import DeadlineExceeded, EngineStopped, GenerationFailed, RequestCancelled
from tests.app.test_metrics import read

URL = "/v1/images/generations"
EDITS = "/v1/images/edits"
STREAM = {"prompt": "a", "stream": True, "seed": 5, "size": "96x64"}
COMMON = {"type", "b64_json", "background", "created_at", "output_format", "quality", "size"}


def parse(text: str) -> list[tuple[str, dict]]:
    """(name, data) of each event, as the HTML standard reads them; comments are dropped."""
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if lines:
            name, data = lines
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def picture_in(data: dict) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(data["b64_json"])))
    image.load()
    return image


async def test_shape_of_a_generation(client, opened):
    response = await client.post(URL, json={**STREAM, "partial_images": 2})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    events = parse(response.text)
    assert [name for name, _ in events] == [*["image_generation.partial_image"] * 2, "image_generation.completed"]
    assert all(data["type"] == name for name, data in events)
    for index, (_, data) in enumerate(events[:2]):
        assert data.keys() == {*COMMON, "partial_image_index"}
        assert data["partial_image_index"] == index
        assert picture_in(data).size == (96, 64)
    completed = events[-1][1]
    assert completed.keys() == {*COMMON, "usage", "seed", "model", "warnings"}
    assert (completed["size"], completed["quality"], completed["background"]) == ("96x64", "high", "opaque")
    plain = await client.post(URL, json={**STREAM, "stream": False})
    assert completed["b64_json"] == plain.json()["data"][0]["b64_json"]
    assert completed["usage"] == plain.json()["usage"]
    assert (completed["seed"], completed["model"]) == (5, "easel-demo")


async def test_shape_of_an_edit(client, png):
    fields = {"prompt": "a", "stream": "true", "partial_images": "1", "output_format": "webp"}
    response = await client.post(EDITS, data=fields, files={"image": png})
    (partial, first), (completed, last) = parse(response.text)
    assert (partial, completed) == ("image_edit.partial_image", "image_edit.completed")
    assert first["output_format"] == last["output_format"] == "webp"
    assert picture_in(last).format == picture_in(first).format == "WEBP"
    assert last["usage"]["input_tokens_details"] == {"text_tokens": 7, "image_tokens": 3}


async def test_without_partial_pictures_there_is_one_event(client):
    assert [name for name, _ in parse((await client.post(URL, json=STREAM)).text)] == ["image_generation.completed"]


async def test_several_pictures_complete_one_by_one_and_their_usage_adds_up(client):
    response = await client.post(URL, json={**STREAM, "n": 3, "partial_images": 2})
    events = [data for _, data in parse(response.text)]
    for index in range(3):
        own = [data for data in events if data["image_index"] == index]
        assert [data.get("partial_image_index") for data in own] == [0, 1, None]
        assert own[-1]["seed"] == 5 + index
    completed = [data for data in events if "usage" in data]
    whole = (await client.post(URL, json={**STREAM, "n": 3, "stream": False})).json()["usage"]
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert sum(data["usage"][name] for data in completed) == whole[name]


async def test_links_instead_of_pictures(client):
    response = await client.post(URL, json={**STREAM, "partial_images": 1, "response_format": "url"})
    for _, data in parse(response.text):
        assert "b64_json" not in data
        assert (await client.get(data["url"])).headers["content-type"] == "image/png"


async def test_warnings_come_with_the_picture(client):
    [(_, data)] = parse((await client.post(URL, json={**STREAM, "style": "vivid"})).text)
    assert len(data["warnings"]) == 1 and "style" in data["warnings"][0]
    answer = (await client.post(URL, json={"prompt": "a", "partial_images": 2})).json()
    assert len(answer["warnings"]) == 1 and "partial_images" in answer["warnings"][0]


JSON_OPTIONS = {"stream_options": '{"include_progress": true}'}
BRACKET_OPTIONS = {"stream_options[include_progress]": "true"}


@pytest.mark.parametrize("options", [None, JSON_OPTIONS, BRACKET_OPTIONS])
async def test_progress_is_told_to_whoever_asks(connect, engine, png, options):
    client = await connect(heartbeat_seconds=0.05)
    engine.may_finish.clear()
    if options:
        fields = {"prompt": "a", "stream": "true", "partial_images": "2", **options}
        sending = client.post(EDITS, data=fields, files={"image": png})
    else:
        fields = {**STREAM, "partial_images": 2, "stream_options": {"include_progress": True}}
        sending = client.post(URL, json=fields)
    answer = asyncio.create_task(sending)
    async with asyncio.timeout(60):
        while engine.num_asked < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    engine.may_finish.set()
    events = parse((await answer).text)
    progress = [
        data for name, data in events if name == ("image_edit" if options else "image_generation") + ".progress"
    ]
    assert len(progress) >= 4  # at once, two steps, and then one for each heartbeat
    assert events[0][1] == progress[0]
    assert all(data.keys() == {"type", "status", "position", "step", "num_steps", "eta_seconds"} for data in progress)
    assert {name.partition(".")[2] for name, _ in events} == {"partial_image", "completed", "progress"}


@pytest.mark.parametrize("options", [{"include_progress": 1}, {"include_progres": True}, [], "x", True])
async def test_bad_stream_options(client, refused, options):
    response = await client.post(URL, json={**STREAM, "stream_options": options})
    refused(response, 400, param="stream_options")


async def test_comments_keep_the_connection_alive(serve, engine):
    client = await serve(heartbeat_seconds=0.01)
    engine.may_finish.clear()
    lines = []
    async with client.stream("POST", URL, json=STREAM) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if lines.count(": keepalive") == 3:
                engine.may_finish.set()
    assert lines[:4] == [": keepalive", "", ": keepalive", ""]
    assert [name for name, _ in parse("\n".join([*lines, ""]))] == ["image_generation.completed"]


async def test_what_is_wrong_with_a_request_is_no_event(connect, engine, refused):
    client = await connect()
    refused(await client.post(URL, json={**STREAM, "size": "1x1"}), 400, param="size")
    refused(await client.post(URL, json={**STREAM, "partial_images": 4}), 400, param="partial_images")
    engine.is_full = True
    refused(await client.post(URL, json=STREAM), 429, code="queue_full")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GenerationFailed("not finite"), "generation_failed"),
        (DeadlineExceeded("late"), "deadline_exceeded"),
        (RequestCancelled("cancelled"), "request_cancelled"),
        (EngineStopped("stopped"), "stopped"),
        (RuntimeError("a secret"), "internal_error"),
    ],
)
async def test_what_goes_wrong_later_is_an_event(client, engine, error, code):
    engine.error = error
    response = await client.post(URL, json={**STREAM, "partial_images": 1})
    assert response.status_code == 200
    (partial, _), (name, data) = parse(response.text)
    assert (partial, name) == ("image_generation.partial_image", "error")
    assert data.keys() == {"type", "error"} and data["type"] == "error"
    assert data["error"].keys() == {"message", "type", "param", "code"}
    assert data["error"]["code"] == code
    assert "secret" not in response.text
    figures = await read(client)
    counted = [key for key in figures if key[0] == "easel_requests_total"]
    assert len(counted) == 1 and counted[0][2] != "ok"


async def test_a_stream_is_counted_once_when_it_is_over(client):
    await client.post(URL, json={**STREAM, "n": 2, "partial_images": 1})
    figures = await read(client)
    assert figures["easel_requests_total", "create_image", "ok"] == 1
    assert figures["easel_time_to_first_partial_seconds_count",] == 1
    assert figures["easel_request_latency_seconds_count",] == 1
    assert figures["easel_images_total",] == 2
    assert figures["easel_file_encode_seconds_sum",] > 0


async def test_a_client_that_leaves_a_stream_ends_it(serve, engine):
    client = await serve(heartbeat_seconds=60)
    engine.may_finish.clear()
    async with client.stream("POST", URL, json={**STREAM, "partial_images": 1}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
        assert engine.num_running == 1
    async with asyncio.timeout(5):
        while engine.num_running:  # noqa: ASYNC110 what the server does is only seen from outside
            await asyncio.sleep(0.005)
    assert engine.num_cancelled == 1
    engine.may_finish.set()
    assert (await read(client))["easel_requests_total", "create_image", "disconnected"] == 1
    assert (await client.post(URL, json=STREAM)).status_code == 200


async def test_events_leave_one_by_one(serve, engine):
    """Over a real socket the first event arrives while the picture is still held back."""
    client = await serve()
    engine.may_finish.clear()
    async with client.stream("POST", URL, json={**STREAM, "partial_images": 1}) as response:
        names = []
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
                engine.may_finish.set()
    assert names == ["image_generation.partial_image", "image_generation.completed"]
