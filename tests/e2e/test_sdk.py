"""The official SDK, unchanged, against a server that really runs, with real photographs."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from openai.types import ImagesResponse
from PIL import Image

from tests.oracle import psnr_db, reference_picture, reference_pipeline
from tests.pictures import photo
from tests.server import Server, serving


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoints["first"], tmp_path_factory.mktemp("server"), "--api-key", "test-key") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="test-key", max_retries=0) as client:
        yield client


def file_of(picture: Image.Image, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, format)
    return file.getvalue()


def pixels_of(response: ImagesResponse, index: int = 0) -> np.ndarray:
    assert response.data
    encoded = response.data[index].b64_json
    assert encoded
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA"))


def test_generation_equals_the_reference(client: openai.OpenAI, checkpoint: Path) -> None:
    response = client.images.generate(
        model="gpt-image-1",
        prompt="a red circle",
        size="256x256",
        background="transparent",
        extra_body={"seed": 7, "num_inference_steps": 4},
    )
    theirs = reference_picture(reference_pipeline(checkpoint), "a red circle", seed=7, num_steps=4, size_px=(256, 256))
    assert psnr_db(pixels_of(response), theirs) >= 50
    assert response.size == "256x256" and response.output_format == "png"
    assert response.usage and response.usage.total_tokens == response.usage.input_tokens + 256
    assert response.data and response.data[0].model_extra == {"seed": 7}


def test_edit_of_photographs_equals_the_reference(client: openai.OpenAI, checkpoint: Path) -> None:
    pictures = [photo("RGB", (256, 192)), photo("RGBA", (150, 200))]
    response = client.images.edit(
        model="gpt-image-1",
        prompt="put the cup beside her",
        image=[file_of(picture) for picture in pictures],
        background="transparent",
        extra_body={"seed": 5, "num_inference_steps": 3, "resolution": 160},
    )
    theirs = reference_picture(
        reference_pipeline(checkpoint),
        "put the cup beside her",
        seed=5,
        num_steps=3,
        images=pictures,
        resolution_px=160,
    )
    assert psnr_db(pixels_of(response), theirs) >= 50


def test_one_file_goes_as_image_and_the_content_decides(client: openai.OpenAI) -> None:
    jpeg = file_of(photo("RGB", (200, 100)), "JPEG")
    response = client.images.edit(
        prompt="brighter", image=("../photo.gif", jpeg, "image/gif"), extra_body={"num_inference_steps": 1}
    )
    height, width, _ = pixels_of(response).shape
    assert 1.7 < width / height < 2.3


def test_several_images_have_their_own_seeds(client: openai.OpenAI) -> None:
    response = client.images.generate(
        prompt="two",
        n=2,
        size="64x64",
        extra_body={"seed": 40, "num_inference_steps": 2},  # type: ignore[call-overload]
    )
    assert [image.model_extra for image in response.data] == [{"seed": 40}, {"seed": 41}]
    assert psnr_db(pixels_of(response, 0), pixels_of(response, 1)) < 40


async def test_async_client_many_at_once(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="test-key", max_retries=0) as client:

        async def draw(seed: int) -> np.ndarray:
            body = {"seed": seed, "num_inference_steps": 3}
            return pixels_of(await client.images.generate(prompt="x", size="64x64", extra_body=body))  # type: ignore[call-overload]

        together = await asyncio.gather(*(draw(seed) for seed in range(6)))
        for seed, picture in enumerate(together):
            assert psnr_db(picture, await draw(seed)) > 50
        edited = await client.images.edit(
            prompt="x", image=file_of(photo("L", (64, 64))), extra_body={"num_inference_steps": 1, "resolution": 64}
        )
        assert pixels_of(edited).shape == (64, 64, 4)


def test_errors_reach_the_sdk_as_its_own_types(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.images.generate(prompt="x", size="7x7")  # type: ignore[call-overload]
    assert bad.value.param == "size" and bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="x", model="no-such-model")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).images.generate(prompt="x")
    assert client.models.list().data


def test_raw_response_carries_the_request_id(client: openai.OpenAI) -> None:
    raw = client.images.with_raw_response.generate(
        prompt="x",
        size="64x64",  # type: ignore[arg-type]
        extra_headers={"x-request-id": "mine-1"},
        extra_body={"num_inference_steps": 1},
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().data


def test_sigterm_drains_and_exits_zero(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as server:
        assert server.stop() == 0
    assert "Traceback" not in server.log
