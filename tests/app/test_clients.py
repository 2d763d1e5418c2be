"""What clients in the wild send, byte for byte but for the pictures: `tests/clients/requests`."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import httpx
import pytest
from PIL import Image

REQUESTS = Path(__file__).resolve().parents[1] / "clients" / "requests"


async def send(client: httpx.AsyncClient, name: str, picture: bytes = b"") -> httpx.Response:
    """Send a recorded request over the client's connection; its lines end as HTTP wants them."""
    text = (REQUESTS / f"{name}.http").read_bytes()
    head, _, body = text.partition(b"\n\n")
    if b"multipart" in head:  # noqa: SIM108
        body = body.replace(b"\n", b"\r\n").replace(b"{{picture}}", picture)
    else:
        body = body.rstrip()
    request_line, *lines = head.decode().split("\n")
    method, path, _ = request_line.split()
    headers = [tuple(line.split(": ", 1)) for line in lines if not line.startswith("Host")]
    return await client.request(method, path, content=body, headers=headers)


def opened(encoded: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


@pytest.fixture
async def client(serve):
    return await serve(api_key=("one",))


async def test_open_webui_draws(client):
    answer = (await send(client, "open_webui_generation")).raise_for_status().json()
    [image] = answer["data"]
    assert "url" not in image  # it would prefer that
    assert opened(image["b64_json"]).size == (512, 512)


async def test_open_webui_edits(client, engine, png):
    answer = (await send(client, "open_webui_edit", png)).raise_for_status().json()
    assert opened(answer["data"][0]["b64_json"]).size == (512, 512)
    assert [image.size for image in engine.received[0].condition_images] == [(48, 40)]
    assert engine.received[0].prompt == "Make it night"


async def test_librechat_draws(client, engine):
    answer = (await send(client, "librechat_generation")).raise_for_status().json()
    assert opened(answer["data"][0]["b64_json"]).format == "WEBP"
    assert answer["warnings"] == []
    assert engine.received[0].size_px is None


async def test_librechat_edits(client, engine, png):
    answer = (await send(client, "librechat_edit", png)).raise_for_status().json()
    assert answer["data"][0]["b64_json"]
    assert len(engine.received[0].condition_images) == 2


async def test_n8n_asks_for_a_link(client):
    answer = (await send(client, "n8n_generation")).raise_for_status().json()
    assert "style" in answer["warnings"][0]
    async with httpx.AsyncClient(trust_env=False) as stranger:
        assert (await stranger.get(answer["data"][0]["url"])).headers["content-type"] == "image/png"
