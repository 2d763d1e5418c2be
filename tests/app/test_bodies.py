"""Long data URLs are lifted out of a JSON text; whatever is done to the text then means the same."""

from __future__ import annotations

import base64
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.bodies import MARK, MIN_LIFTED_CHARS, lift_urls
from tests.app.test_sources import data_url

LONG = "data:image/png;base64," + "A" * MIN_LIFTED_CHARS


def restored(value: object, lifted: tuple[memoryview, ...]) -> object:
    if isinstance(value, list):
        return [restored(item, lifted) for item in value]
    if isinstance(value, dict):
        return {restored(name, lifted): restored(item, lifted) for name, item in value.items()}
    if isinstance(value, str) and value.startswith(MARK):
        return bytes(lifted[int(value.removeprefix(MARK))]).decode()
    return value


TEXTS = st.sampled_from(
    [LONG, LONG + "=", '"' + LONG, "\\" + LONG, LONG + '"', LONG + "/\n", "data:", '"data:', "x", ""]
)


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)))
def test_nothing_is_lost_or_changed(value: object) -> None:
    body = lift_urls(bytearray(json.dumps(value).encode()))
    assert restored(json.loads(body.text), body.lifted) == value


def test_only_long_urls_are_lifted() -> None:
    body = lift_urls(bytearray(json.dumps({"a": LONG, "b": "data:x", "c": [LONG, LONG + "é"]}).encode()))
    assert [bytes(view).decode() for view in body.lifted] == [LONG, LONG]
    assert len(body.text) < 2 * MIN_LIFTED_CHARS


@pytest.mark.parametrize("text", [b"", b'"data:', b'"data:' + b"A" * MIN_LIFTED_CHARS, b"[" * 100_000])
def test_broken_text_stays_as_it_is(text: bytes) -> None:
    assert lift_urls(bytearray(text)).text == text


async def test_a_long_url_where_a_text_belongs_is_refused(client, refused):
    url = "/v1/images/edits"
    picture = data_url(b"x")
    refused(await client.post(url, json={"prompt": LONG, "image": picture}), 400, param="prompt")
    response = await client.post(url, json={"prompt": "a", "negative_prompt": LONG, "image": picture})
    refused(response, 400, param="negative_prompt")
    chat = {"messages": [{"role": "user", "content": LONG}]}
    refused(await client.post("/v1/chat/completions", json=chat), 400, param="messages")


@pytest.mark.parametrize("mark", [MARK + "0", MARK + "7", MARK, MARK + "x", MARK + "1" * 100])
async def test_a_mark_of_the_clients_own_stands_for_nothing(client, refused, mark):
    response = await client.post("/v1/images/edits", json={"prompt": "a", "image": mark})
    refused(response, 400, param="image", code="invalid_image_url")


async def test_a_large_picture_by_data_url(client, engine, encoded):
    picture = Image.frombytes("RGB", (300, 300), os.urandom(270_000))
    content = encoded(picture)
    assert len(base64.b64encode(content)) > MIN_LIFTED_CHARS
    image = {"type": "image_url", "image_url": {"url": data_url(content)}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    for path, fields in (
        ("/v1/images/edits", {"prompt": "a", "images": [{"image_url": data_url(content)}]}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        response = await client.post(path, json=fields)
        assert response.status_code == 200, response.text
        assert engine.received[-1].condition_images[0].convert("RGB").tobytes() == picture.tobytes()
