"""Streams from a server that really runs, read by the official SDK."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from openai.types import (
    ImageEditCompletedEvent,
    ImageEditPartialImageEvent,
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
)
from PIL import Image

from tests.oracle import psnr_db
from tests.pictures import photo
from tests.server import Server, serving

STEPS = {"num_inference_steps": 20, "seed": 3}


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoints["first"], tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def pixels_of(encoded: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB"))


def jpeg(size_px: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    photo("RGB", size_px).save(file, "JPEG")
    return file.getvalue()


def test_generation(client: openai.OpenAI) -> None:
    stream = client.images.generate(
        prompt="a red circle", size="128x96", stream=True, partial_images=3, extra_body=STEPS
    )
    *partials, last = list(stream)
    assert [type(event) for event in partials] == [ImageGenPartialImageEvent] * 3
    assert isinstance(last, ImageGenCompletedEvent)
    assert [event.partial_image_index for event in partials] == [0, 1, 2]
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens
    closeness = [psnr_db(pixels_of(event.b64_json), pixels_of(last.b64_json)) for event in partials]
    assert closeness == sorted(closeness)
    plain = client.images.generate(prompt="a red circle", size="128x96", extra_body=STEPS)  # type: ignore[call-overload]
    assert plain.data[0].b64_json == last.b64_json


async def test_edit_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.images.edit(
            prompt="brighter",
            image=[jpeg((96, 64)), jpeg((64, 64))],
            size="64x64",  # type: ignore[arg-type]
            stream=True,
            partial_images=2,
            extra_body={**STEPS, "resolution": 64},
        )
        *partials, last = [event async for event in stream]
    assert [type(event) for event in partials] == [ImageEditPartialImageEvent] * 2
    assert isinstance(last, ImageEditCompletedEvent)
    assert last.usage.input_tokens_details.image_tokens > 0


async def test_a_stream_that_is_left_frees_the_worker(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.images.generate(
            prompt="a", size="256x256", n=10, stream=True, partial_images=1, extra_body={"num_inference_steps": 200}
        )
        async for event in stream:
            assert event.type == "image_generation.partial_image"
            break
        await stream.close()
        async with asyncio.timeout(60):
            body = {"num_inference_steps": 1, "priority": -10}
            assert (await client.images.generate(prompt="b", size="64x64", extra_body=body)).data  # type: ignore[call-overload]


def test_a_cancelled_stream_ends_in_an_error(server: Server, client: openai.OpenAI) -> None:
    stream = client.images.generate(
        prompt="a",
        size="256x256",
        n=10,
        stream=True,
        partial_images=1,
        extra_body={"num_inference_steps": 200},
        extra_headers={"x-request-id": "mine"},
    )
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            client.delete("/images/requests/mine", cast_to=object)
    assert caught.value.code == "request_cancelled"
