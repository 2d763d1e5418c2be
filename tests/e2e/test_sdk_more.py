"""The official SDK beyond a plain picture: chat, links, retries, timeouts, raw responses, both kinds of client."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.test_sdk import file_of
from tests.pictures import photo
from tests.server import Server, serving
from tests.tiny_checkpoint import TinySpec, build_checkpoint

SHORT: dict[str, Any] = {"num_inference_steps": 2, "seed": 3}
LONG: dict[str, Any] = {"num_inference_steps": 200, "priority": 10}
PATIENCE_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = build_checkpoint(tmp_path_factory.mktemp("tiny"), TinySpec(resolution=64))
    with serving(checkpoint, tmp_path_factory.mktemp("server"), "--max-queue", "2") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def jpeg() -> bytes:
    return file_of(photo("RGB", (96, 64)), "JPEG")


def turn(text: str, *pictures: bytes) -> Any:
    urls = [f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}" for picture in pictures]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *images]}


def picture_of(message: Any) -> bytes:
    [image] = message.model_extra["images"]
    return base64.b64decode(image["image_url"]["url"].partition(",")[2])


def test_chat_draws_the_same_as_edits_and_generations(client: openai.OpenAI, jpeg: bytes) -> None:
    body = {**SHORT, "size": "64x64"}
    chat = client.chat.completions.create(model="gpt-image-1", messages=[turn("brighter", jpeg)], extra_body=body)
    edit = client.images.edit(prompt="brighter", image=jpeg, extra_body=body)
    assert edit.data and base64.b64encode(picture_of(chat.choices[0].message)).decode() == edit.data[0].b64_json
    assert chat.usage and edit.usage and chat.usage.total_tokens == edit.usage.total_tokens
    chat = client.chat.completions.create(model="gpt-image-1", messages=[turn("a cat")], extra_body=body)
    plain = client.images.generate(prompt="a cat", extra_body=body)
    assert plain.data and base64.b64encode(picture_of(chat.choices[0].message)).decode() == plain.data[0].b64_json


def test_a_conversation_changes_its_own_picture(client: openai.OpenAI) -> None:
    messages = [turn("a cat")]
    first = client.chat.completions.create(model="gpt-image-1", messages=messages, extra_body=SHORT).choices[0].message
    messages += [first.model_dump(), turn("with a hat")]
    second = client.chat.completions.create(model="gpt-image-1", messages=messages, extra_body=SHORT)
    edit = client.images.edit(prompt="with a hat", image=picture_of(first), extra_body=SHORT)
    assert edit.data and base64.b64encode(picture_of(second.choices[0].message)).decode() == edit.data[0].b64_json


async def test_chat_in_deltas(server: Server, jpeg: bytes) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="gpt-image-1",
            messages=[turn("brighter", jpeg)],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={**SHORT, "size": "64x64"},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas).startswith("Here is")
    assert [bool((delta.model_extra or {}).get("images")) for delta in deltas].count(True) == 1
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage and chunks[-1].usage.total_tokens > 0


def test_a_link_can_be_opened_by_anyone(client: openai.OpenAI) -> None:
    response = client.images.generate(prompt="a", response_format="url", size="64x64", extra_body=SHORT)  # type: ignore[call-overload]
    assert response.data[0].b64_json is None
    assert httpx.get(response.data[0].url).headers["content-type"] == "image/png"


def test_raw_and_streamed_responses(client: openai.OpenAI) -> None:
    raw = client.images.with_raw_response.generate(prompt="a", extra_body=SHORT)
    assert raw.http_response.status_code == 200 and raw.headers["x-request-id"]
    assert raw.parse().data
    with client.images.with_streaming_response.generate(
        prompt="a", extra_body=SHORT, extra_headers={"accept": "image/webp"}
    ) as streamed:
        assert streamed.headers["content-type"] == "image/webp"
        assert b"".join(streamed.iter_bytes()).startswith(b"RIFF")
    with client.images.with_raw_response.generate(prompt="a", stream=True, extra_body=SHORT).parse() as events:
        assert [event.type for event in events] == ["image_generation.completed"]


def test_a_job_by_the_sdk(client: openai.OpenAI) -> None:
    body = {**SHORT, "background_job": True}
    raw = client.images.with_raw_response.generate(prompt="a", extra_body=body)
    assert raw.http_response.status_code == 202
    state = client.get(raw.headers["location"].removeprefix("/v1"), cast_to=dict[str, Any])
    deadline_s = time.monotonic() + PATIENCE_S
    while state["status"] != "completed":
        assert state["status"] in ("queued", "running") and time.monotonic() < deadline_s
        time.sleep(0.05)
        state = client.get(raw.headers["location"].removeprefix("/v1"), cast_to=dict[str, Any])
    answer = client.get(state["result"].removeprefix("/v1"), cast_to=openai.types.ImagesResponse)
    plain = client.images.generate(prompt="a", extra_body=SHORT)
    assert answer.data and plain.data and answer.data[0].b64_json == plain.data[0].b64_json


def fill_queue(client: openai.OpenAI) -> list[str]:
    """Two jobs of a few seconds; nothing else is admitted meanwhile. The SDK never waits for more than two minutes."""
    ids = []
    for size in ("256x256", "256x224"):
        raw = client.images.with_raw_response.generate(  # type: ignore[call-overload]
            prompt="a", size=size, n=3, extra_body={"num_inference_steps": 100, "background_job": True}
        )
        ids.append(raw.headers["x-request-id"])
    return ids


def drop(client: openai.OpenAI, request_id: str) -> None:
    client.delete(f"/images/requests/{request_id}", cast_to=object)


def test_the_sdk_retries_a_full_queue(server: Server, client: openai.OpenAI) -> None:
    ids = fill_queue(client)
    try:
        with pytest.raises(openai.RateLimitError) as caught:
            client.images.generate(prompt="a", extra_body=SHORT)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        statuses: list[int] = []

        def make_room(response: Any) -> None:
            statuses.append(response.status_code)
            if response.status_code == 429:
                for request_id in ids:
                    drop(client, request_id)

        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=5, timeout=PATIENCE_S) as patient:
            patient._client.event_hooks["response"].append(make_room)
            assert patient.images.generate(prompt="a", extra_body={**SHORT, "priority": 10}).data
        assert statuses == [429, 200]
    finally:
        for request_id in ids:
            drop(client, request_id)


async def test_the_async_sdk_retries_while_the_worker_is_replaced(server: Server) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=8, timeout=PATIENCE_S
    ) as client:
        [worker] = server.workers()
        os.kill(worker, signal.SIGKILL)
        statuses: list[int] = []

        async def on_response(response: Any) -> None:
            statuses.append(response.status_code)

        client._client.event_hooks["response"].append(on_response)
        async with asyncio.timeout(PATIENCE_S):
            while (await asyncio.to_thread(httpx.get, f"{server.url}/health/ready")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await client.images.generate(prompt="a", extra_body=SHORT)).data
        assert statuses[0] == 503 and statuses[-1] == 200


def test_a_client_side_timeout_leaves_nothing_behind(server: Server, client: openai.OpenAI) -> None:
    """A timeout that the SDK doesn't announce: the connection closes, and the request is gone."""
    with pytest.raises(openai.APITimeoutError):
        client.images.generate(
            prompt="a",
            size="256x256",
            n=10,
            timeout=1.0,
            extra_body=LONG,
            extra_headers={"x-stainless-read-timeout": "3600"},
        )
    deadline_s = time.monotonic() + PATIENCE_S
    while (state := httpx.get(f"{server.url}/health/ready").json())["running"] + state["waiting"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
