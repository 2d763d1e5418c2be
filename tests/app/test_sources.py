"""Pictures by URL: in JSON edits, in forms, and as what they are not."""

from __future__ import annotations

import base64
import json

import pytest
from PIL import Image

from app.errors import ApiError
from app.sources import DataUrl, source_of

URL = "/v1/images/edits"


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@pytest.fixture
def colours(encoded):
    """A file of each colour."""
    return {name: encoded(Image.new("RGB", (40, 40), name)) for name in ("red", "lime", "blue", "white")}


def drawn(engine) -> list[tuple[int, ...]]:
    return [picture.getpixel((0, 0))[:3] for picture in engine.received[0].condition_images]


JUNK = "data:image/png;base64,AAAA"
RED, LIME, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


@pytest.mark.parametrize(
    "spell",
    [
        lambda urls: {"images": [{"image_url": url} for url in urls]},
        lambda urls: {"images": [{"image_url": {"url": url}} for url in urls]},
        lambda urls: {"image": urls},
        lambda urls: {"images": [{"image_url": urls[0]}], "image": urls[1]},
    ],
)
async def test_json_edits(client, engine, colours, spell):
    urls = [data_url(colours["red"]), data_url(colours["blue"])]
    response = await client.post(URL, json={"prompt": "a", "seed": 4, "size": "64x64", **spell(urls)})
    assert response.status_code == 200, response.text
    assert drawn(engine) == [RED, BLUE]
    assert engine.received[0].seed == 4


async def test_json_and_form_give_the_same(client, colours):
    fields = {"prompt": "a", "seed": 4, "n": 2}
    as_json = await client.post(URL, json={**fields, "images": [{"image_url": data_url(colours["red"])}]})
    as_form = await client.post(
        URL, data={name: str(value) for name, value in fields.items()}, files={"image": colours["red"]}
    )
    for name in ("data", "usage", "size"):
        assert as_json.json()[name] == as_form.json()[name]


async def test_mixed_form_spellings_keep_their_order(client, engine, colours):
    files = [
        ("url", (None, data_url(colours["red"]))),
        ("image[]", ("upload", colours["lime"])),
        ("images[0][image_url]", (None, data_url(colours["blue"], "image/jpeg"))),
        ("image", (None, " " + data_url(colours["white"]) + "\r\n")),
    ]
    response = await client.post(URL, data={"prompt": "a"}, files=files)
    assert response.status_code == 200, response.text
    assert drawn(engine) == [RED, LIME, BLUE, WHITE]


async def test_our_own_links_are_good_for_edits(client, engine):
    linked = await client.post("/v1/images/generations", json={"prompt": "a", "response_format": "url", "seed": 9})
    [data] = linked.json()["data"]
    response = await client.post(URL, json={"prompt": "a", "images": [{"image_url": data["url"]}]})
    assert response.status_code == 200
    assert engine.received[1].condition_images[0].getpixel((0, 0)) == (0, 0, 9, 255)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,!!!!", "invalid_image"),
        ("data:image/png;base64,AAA", "invalid_image"),
        ("data:image/png;base64,AA==AA==", "invalid_image"),
        ("data:image/png;base64,ÄÄÄÄ", "invalid_image"),
        ("data:image/png;base64,", "invalid_image"),
        ("data:image/png;base64,AAAA", "invalid_image"),
        ("data:image/png,AAAA", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:" + "x" * 1000, "invalid_image_url"),
        ("data:text/html;base64,AAAA", "invalid_image_url"),
        ("data:image/svg+xml;base64,AAAA", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        ("ftp://example.org/a.png", "invalid_image_url"),
        ("/etc/passwd", "invalid_image_url"),
        ("a.png", "invalid_image_url"),
        ("", "invalid_image_url"),
        ("http://example.org/a.png", "url_not_allowed"),
        ("HTTPS://example.org/a.png", "url_not_allowed"),
        ("http://[", "url_not_allowed"),
    ],
)
@pytest.mark.parametrize("way", ["images", "image", "form"])
async def test_what_is_no_picture_is_400(client, engine, refused, url, code, way):
    if way == "form":
        response = await client.post(URL, data={"prompt": "a"}, files={"url": (None, url)})
    else:
        value = [{"image_url": url}] if way == "images" else url
        response = await client.post(URL, json={"prompt": "a", way: value})
    assert response.json()["error"]["param"] in ("images", "image")
    error = refused(response, 400, param=response.json()["error"]["param"])
    assert error["code"] == code
    assert "passwd" not in response.text
    assert engine.received == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "image"),
        ({"images": []}, "image"),
        ({"images": [{"image_url": JUNK}] * 5}, "image"),
        ({"images": [{"image_url": JUNK}] * 3, "image": [JUNK] * 2}, "image"),
        ({"images": [{"file_id": "x"}]}, "images"),
        ({"images": [{"image_url": "x", "more": 1}]}, "images"),
        ({"images": [{"image_url": {"url": "x", "more": 1}}]}, "images"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images"),
        ({"images": "x"}, "images"),
        ({"image": 1}, "image"),
        ({"image": {"url": "x", "more": 1}}, "image"),
        ({"images": [{"image_url": "data:image/png;base64,AAAA"}], "mask": "x"}, "mask"),
    ],
)
async def test_bad_json_edits(client, refused, monkeypatch, fields, param):
    monkeypatch.setattr("app.orders.decode_upload", pytest.fail)
    refused(await client.post(URL, json={"prompt": "a", **fields}), 400, param=param)


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b"\xff", b'{"x": 1e999}', b"[" * 100_000])
async def test_malformed_json_edits(client, refused, body):
    response = await client.post(URL, content=body, headers={"content-type": "application/json"})
    refused(response, 400, param=response.json()["error"]["param"])


async def test_escaped_slashes_as_php_writes_them(client, engine, colours):
    body = json.dumps({"prompt": "a", "image": data_url(colours["red"])}).replace("/", "\\/")
    assert (await client.post(URL, content=body, headers={"content-type": "application/json"})).status_code == 200
    assert drawn(engine) == [RED]


@pytest.mark.parametrize("way", ["json", "form"])
async def test_a_picture_over_the_limit_is_413(connect, refused, way):
    client = await connect(max_image_bytes=1000)
    url = data_url(b"x" * 1001)
    if way == "json":
        response = await client.post(URL, json={"prompt": "a", "image": url})
    else:
        response = await client.post(URL, data={"prompt": "a"}, files={"image": (None, url)})
    refused(response, 413, param="image", code="payload_too_large")


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 2**21 + 1])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.encodebytes])
def test_data_urls_are_read_exactly(size: int, encode) -> None:
    content = bytes(index % 251 for index in range(size))
    source = source_of("data:image/png;charset=x;base64," + encode(content).decode(), param="image")
    assert isinstance(source, DataUrl)
    assert source.read(size) == content
    with pytest.raises(ApiError) as caught:
        source.read(size - 1)
    assert caught.value.status == 413


@pytest.mark.parametrize("text", ["AAAA" * 1000 + "AA==AAAA", "AA=A", "A", "AA", "A===", "AAA-", "AA_A", "AAAA=", "="])
def test_what_is_not_base64(text: str) -> None:
    source = source_of("data:;base64," + text, param="image")
    assert isinstance(source, DataUrl)
    with pytest.raises(ApiError) as caught:
        source.read(10**9)
    assert caught.value.status == 400
