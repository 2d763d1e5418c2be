"""What no endpoint that takes a body may fall over, whichever it is: the same bad bodies for each of them."""

from __future__ import annotations

import base64
import json

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from app.launch import make_engine
from app.main import create_app
from app.settings import Settings

JSON, FORM = {"content-type": "application/json"}, {"content-type": "multipart/form-data; boundary=frontier"}
GENERATIONS, EDITS, CHAT = "/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"

each_endpoint = pytest.mark.parametrize("path", [GENERATIONS, EDITS, CHAT])


@pytest.fixture
def order(path: str, png: bytes) -> dict[str, object]:
    """What the endpoint takes."""
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    orders: dict[str, dict[str, object]] = {
        GENERATIONS: {"prompt": "a"},
        EDITS: {"prompt": "a", "images": [{"image_url": url}]},
        CHAT: {"messages": [{"role": "user", "content": "a"}]},
    }
    return orders[path]


def with_member(order: dict[str, object], member: bytes) -> bytes:
    return json.dumps(order).encode()[:-1] + b", " + member + b"}"


@each_endpoint
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"a"', b"\xff", b"[" * 100_000, b'{"a": ' * 100_000],
    ids=["empty", "cut off", "null", "list", "text", "not UTF-8", "deep list", "deep object"],
)
async def test_a_body_that_is_no_object_is_400(client, engine, refused, path, order, body):
    answer = await client.post(path, content=body, headers=JSON)
    refused(answer, 400, code=answer.json()["error"]["code"])
    assert (await client.post(path, json=order)).status_code == 200
    assert len(engine.received) == 1


@each_endpoint
@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"9" * 5000], ids=lambda text: text[:9].decode())
@pytest.mark.parametrize("name", [b"n", b"true_cfg_scale", b"unheard"])
async def test_numbers_that_are_none_are_400(client, engine, path, order, name, number):
    answer = await client.post(path, content=with_member(order, b'"%s": %s' % (name, number)), headers=JSON)
    assert (answer.status_code, engine.received) == (400, [])
    assert answer.json()["error"]["message"] and len(answer.content) <= 2048


@each_endpoint
async def test_a_field_that_nobody_knows_is_400(client, refused, path, order):
    refused(await client.post(path, json={**order, "lora": "/x"}), 400, param="lora", code="unknown_parameter")


@each_endpoint
async def test_a_nul_in_the_prompt_is_400(client, engine, refused, path, order):
    text = json.dumps(order).replace('"a"', '"a\\u0000"')
    refused(await client.post(path, content=text, headers=JSON), 400, param="messages" if path == CHAT else "prompt")
    assert engine.received == []


@each_endpoint
@pytest.mark.parametrize(
    "headers", [{}, {"content-type": "text/plain"}, {**JSON, "content-encoding": "gzip"}], ids=["none", "text", "gzip"]
)
async def test_other_kinds_of_body_are_415(client, refused, path, order, headers):
    refused(await client.post(path, content=json.dumps(order).encode(), headers=headers), 415)


@pytest.mark.parametrize("path, headers", [(GENERATIONS, JSON), (EDITS, JSON), (EDITS, FORM), (CHAT, JSON)])
async def test_a_body_over_the_limit_is_413_while_it_arrives(connect, refused, path, headers):
    client = await connect(max_body_bytes=100_000)
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 10_000
            yield b"\r\n" * 5000

    refused(await client.post(path, content=endless(), headers=headers), 413)
    assert sent <= 120_000


@each_endpoint
async def test_any_script_is_drawn(client, engine, path, order):
    text = json.dumps(order, ensure_ascii=False).replace('"a"', '"سفينة 🦊 𠜎 e\u0301\u200f"')
    assert (await client.post(path, content=text.encode(), headers=JSON)).status_code == 200
    assert engine.received[0].prompt == "سفينة 🦊 𠜎 e\u0301\u200f"


def test_no_middleware_hides_a_disconnect() -> None:
    settings = Settings(api_key=("one",), cors_origin=("*",), otlp_endpoint="http://localhost:4318")
    kinds = [entry.cls for entry in create_app(settings, make_engine(settings)).user_middleware]
    assert len(kinds) >= 6
    assert not any(issubclass(kind, BaseHTTPMiddleware) for kind in kinds)
