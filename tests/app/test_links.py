"""Links to pictures: absolute, signed, and good for a while."""

from __future__ import annotations

import asyncio
import io
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

from app.links import Links, PictureFile

URL = "/v1/images/generations"
LINKED = {"prompt": "a", "response_format": "url", "size": "96x64"}


async def link(client, **fields) -> str:
    response = await client.post(URL, json={**LINKED, **fields})
    [data] = response.json()["data"]
    assert data.keys() == {"url", "seed"}
    return data["url"]


@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
async def test_a_link_leads_to_the_picture(client, opened, output_format):
    url = await link(client, output_format=output_format, seed=1)
    assert url.startswith("http://easel/v1/images/files/")
    response = await client.get(url)
    assert (response.status_code, response.headers["content-type"]) == (200, f"image/{output_format}")
    plain = {"prompt": "a", "size": "96x64", "output_format": output_format, "seed": 1}
    assert Image.open(io.BytesIO(response.content)).tobytes() == opened(await client.post(URL, json=plain)).tobytes()


async def test_a_link_is_its_own_permission(connect, refused):
    client = await connect(api_key=("one",))
    headers = {"authorization": "Bearer one"}
    response = await client.post(URL, json=LINKED, headers=headers)
    url = response.json()["data"][0]["url"]
    assert (await client.get(url)).status_code == 200
    bare = url.partition("?")[0]
    refused(await client.get(bare), 401, code="invalid_api_key")
    refused(await client.get(bare, headers=headers), 403, code="invalid_link")
    query = urlsplit(url).query
    refused(await client.get(f"/v1/models?{query}"), 401)
    refused(await client.get(f"/v1/images/files/other.png?{query}"), 401)
    refused(await client.post(url), 405)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: {**fields, "expires": str(int(fields["expires"]) + 1)},
        lambda fields: {**fields, "signature": fields["signature"][:-1]},
        lambda fields: {**fields, "signature": "é"},
        lambda fields: {"signature": fields["signature"]},
        lambda fields: {"expires": fields["expires"]},
        lambda fields: {},
    ],
)
async def test_a_changed_link_is_refused(client, refused, change):
    url = await link(client)
    fields = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    refused(await client.get(url.partition("?")[0], params=change(fields)), 403, code="invalid_link")


async def test_links_expire(connect, refused):
    client = await connect(link_seconds=1)
    url = await link(client)
    assert (await client.get(url)).status_code == 200
    await asyncio.sleep(1.1)
    refused(await client.get(url), 403, code="invalid_link")


async def test_the_oldest_pictures_make_room(connect, refused):
    client = await connect(link_store_bytes=1)
    first, second = await link(client), await link(client)
    refused(await client.get(first), 404, code="file_not_found")
    assert (await client.get(second)).status_code == 200


async def test_the_operator_knows_the_public_address(connect):
    client = await connect(public_url="https://pictures.example.org/easel/")
    assert (await link(client)).startswith("https://pictures.example.org/easel/v1/images/files/")


async def test_an_odd_host_header_does_no_harm(client):
    for host in ("a b", "x/../y", "[", "é".encode(), ""):
        response = await client.post(URL, json=LINKED, headers={"host": host})
        assert response.status_code == 200


def test_expiry_follows_the_clock() -> None:
    now_s = 1000.0
    links = Links(max_bytes=100, lifetime_s=60, clock=lambda: now_s)
    parts = urlsplit(links.publish(PictureFile(b"x", "png"), "http://h"))
    assert links.admits(parts.path, parts.query)
    now_s = 1059.0
    assert links.admits(parts.path, parts.query)
    now_s = 1060.0
    assert not links.admits(parts.path, parts.query)
    assert links.open(parts.path.rpartition("/")[2]) is None
