"""POST /v1/chat/completions: what a conversation asks for, and the shapes of its answer."""

from __future__ import annotations

import base64
import io
import json

import pytest
from PIL import Image

from engine.errors import GenerationFailed
from tests.app.test_metrics import read
from tests.app.test_sources import BLUE, LIME, RED, data_url, drawn

URL = "/v1/chat/completions"


def user(*content) -> dict:
    """A user turn of texts and (as bytes) pictures."""
    parts = [
        {"type": "text", "text": item}
        if isinstance(item, str)
        else {"type": "image_url", "image_url": {"url": data_url(item), "detail": "auto"}}
        for item in content
    ]
    return {"role": "user", "content": parts}


def assistant(*pictures: bytes, content: object = "Here it is.") -> dict:
    images = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    return {"role": "assistant", "content": content, "images": images}


def picture_in(message: dict) -> Image.Image:
    [image] = message["images"]
    url = image["image_url"]["url"]
    assert image["type"] == "image_url" and url.startswith("data:image/")
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


@pytest.fixture
def colours(encoded):
    return {name: encoded(Image.new("RGB", (40, 40), name)) for name in ("red", "lime", "blue")}


async def test_shape_of_an_answer(client, engine):
    fields = {"size": "96x64", "seed": 5, "num_inference_steps": 7, "n": 2, "negative_prompt": "ugly"}
    messages = [{"role": "user", "content": "a fox"}]
    response = await client.post(URL, json={"model": "gpt-image-1", "messages": messages, **fields})
    answer = response.json()
    assert response.status_code == 200, response.text
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage", "warnings"}
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["seed"] for choice in answer["choices"]] == [5, 6]
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert choice["message"].keys() == {"role", "content", "images", "refusal"}
        assert isinstance(choice["message"]["content"], str)
        assert picture_in(choice["message"]).size == (96, 64)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 32, 39)
    assert usage["prompt_tokens_details"] == {"text_tokens": 7, "image_tokens": 0, "cached_tokens": 0}
    [params] = engine.received
    assert (params.prompt, params.size_px, params.seed, params.num_steps) == ("a fox", (96, 64), 5, 7)
    assert params.negative_prompt == "ugly"
    assert (await read(client))["easel_requests_total", "chat_completion", "ok"] == 1


async def test_same_content_same_bytes_through_every_endpoint(client, colours):
    fields = {"seed": 3, "size": "96x64"}
    prompt = {"prompt": "make it blue"}
    chat = await client.post(URL, json={"messages": [user("make it blue", colours["red"])], **fields})
    form = {**prompt, "seed": "3", "size": "96x64"}
    edit = await client.post("/v1/images/edits", data=form, files={"image": colours["red"]})
    as_json = await client.post("/v1/images/edits", json={**prompt, **fields, "image": data_url(colours["red"])})
    url = chat.json()["choices"][0]["message"]["images"][0]["image_url"]["url"]
    [first], [second] = edit.json()["data"], as_json.json()["data"]
    assert url == "data:image/png;base64," + first["b64_json"] == "data:image/png;base64," + second["b64_json"]
    chat = await client.post(URL, json={"messages": [user("make it blue")], **fields})
    plain = await client.post("/v1/images/generations", json={**prompt, **fields})
    url = chat.json()["choices"][0]["message"]["images"][0]["image_url"]["url"]
    assert url == "data:image/png;base64," + plain.json()["data"][0]["b64_json"]


async def test_the_last_user_turn_counts(client, engine, colours):
    messages = [
        {"role": "system", "content": "You draw."},
        user("a cat", colours["red"]),
        assistant(colours["lime"]),
        user("now", "a dog", colours["blue"], colours["red"]),
    ]
    response = await client.post(URL, json={"messages": messages})
    assert engine.received[0].prompt == "now\na dog"
    assert drawn(engine) == [BLUE, RED]
    assert "System" in response.json()["warnings"][0]


@pytest.mark.parametrize(
    "spell",
    [
        lambda url: {"content": "Done.", "images": [{"type": "image_url", "image_url": {"url": url}}]},
        lambda url: {"content": None, "images": [{"type": "image_url", "image_url": {"url": url}, "index": 0}]},
        lambda url: {"content": [{"type": "text", "text": "Done."}, {"type": "image_url", "image_url": {"url": url}}]},
        lambda url: {"content": f"Done. ![a picture]({url}) Better?"},
        lambda url: {"content": f'![]( <{url}> "title")'},
    ],
)
async def test_without_an_image_the_last_picture_is_changed(client, engine, colours, spell):
    messages = [
        user("a cat", colours["red"]),
        assistant(colours["red"], colours["red"]),
        user("greener"),
        {"role": "assistant", **spell(data_url(colours["lime"]))},
        {"role": "assistant", "content": "Shall I go on?"},
        user("bigger"),
    ]
    response = await client.post(URL, json={"messages": messages})
    assert response.status_code == 200, response.text
    assert drawn(engine) == [LIME]
    assert engine.received[0].prompt == "bigger"


async def test_a_conversation_goes_on_with_its_own_answer(client, engine):
    """The assistant's message is handed back as it came, in each of the three shapes."""
    messages: list[dict] = [{"role": "user", "content": "a cat"}]
    first = (await client.post(URL, json={"messages": messages, "seed": 9})).json()["choices"][0]["message"]
    messages += [first, {"role": "user", "content": "bigger"}]
    assert (await client.post(URL, json={"messages": messages})).status_code == 200
    assert engine.received[1].condition_images[0].getpixel((0, 0)) == (0, 0, 9, 255)


async def test_user_markdown_is_text(client, engine, colours):
    await client.post(URL, json={"messages": [user(f"![x]({data_url(colours['red'])[:200]})")]})
    assert engine.received[0].condition_images == ()


@pytest.mark.parametrize("shape", ["text", "markdown", "parts"])
async def test_shapes_of_content(connect, engine, shape):
    client = await connect(chat_content=shape)
    [choice] = (await client.post(URL, json={"messages": [user("a")], "seed": 9})).json()["choices"]
    content, [image] = choice["message"]["content"], choice["message"]["images"]
    if shape == "text":
        assert "9" in content and "data:" not in content
    elif shape == "markdown":
        assert content.startswith("![") and content.endswith(f"]({image['image_url']['url']})")
    else:
        assert [part["type"] for part in content] == ["text", "image_url"]
        assert content[1] == image
    again = [user("a"), {"role": "assistant", "content": content}, user("b")]
    assert (await client.post(URL, json={"messages": again})).status_code == 200
    assert len(engine.received[1].condition_images) == (0 if shape == "text" else 1)


async def test_links_in_chat(client):
    [choice] = (await client.post(URL, json={"messages": [user("a")], "response_format": "url"})).json()["choices"]
    url = choice["message"]["images"][0]["image_url"]["url"]
    assert (await client.get(url)).headers["content-type"] == "image/png"
    again = [user("a"), choice["message"], user("b")]
    assert (await client.post(URL, json={"messages": again})).status_code == 200


def chunks_of(text: str) -> list[dict]:
    *lines, done = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_deltas(client):
    fields = {"messages": [user("a")], "stream": True, "n": 2, "seed": 5, "stream_options": {"include_usage": True}}
    response = await client.post(URL, json=fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = chunks_of(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None, None, "stop"]
        assert own[1]["seed"] == 5 + index
        assert own[1]["delta"]["images"][0].keys() == {"type", "image_url", "index"}
        assert own[2]["delta"] == {}
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 39
    assert (await read(client))["easel_requests_total", "chat_completion", "ok"] == 1


async def test_without_usage_every_chunk_has_a_choice(client):
    fields = {"messages": [user("a")], "stream": True, "temperature": 0.7}
    chunks = chunks_of((await client.post(URL, json=fields)).text)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    assert "temperature" in chunks[0]["warnings"][0]


async def test_what_goes_wrong_in_a_stream_is_an_event(client, engine):
    engine.error = GenerationFailed("not finite")
    text = (await client.post(URL, json={"messages": [user("a")], "stream": True})).text
    assert text.count("event: error") == 1 and "generation_failed" in text and "[DONE]" not in text


async def test_what_clients_send_along(client):
    fields = {
        **{"temperature": 0.7, "top_p": 1, "max_tokens": 100, "stop": ["x"], "logit_bias": {}, "user": "u"},
        **{"metadata": {"a": "b"}, "store": False, "tools": [], "tool_choice": "none", "logprobs": False},
        **{"modalities": ["text", "image"], "response_format": {"type": "text"}, "parallel_tool_calls": True},
    }
    response = await client.post(URL, json={"messages": [user("a")], **fields})
    assert response.status_code == 200, response.text
    warned = response.json()["warnings"]
    assert [name for name in fields if any(f"'{name}'" in warning for warning in warned)] == [
        *("temperature", "top_p", "max_tokens", "stop", "logit_bias")
    ]


FILE_PART = {"type": "image_url", "image_url": "file:///x"}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, "invalid_type"),
        ([], "invalid_value"),
        ("hello", "invalid_type"),
        ([{"role": "assistant", "content": "a"}], "missing_required_parameter"),
        ([{"role": "user", "content": ""}], "invalid_value"),
        ([{"role": "user", "content": None}], "invalid_value"),
        ([{"role": "user"}], "invalid_value"),
        ([{"role": "user", "content": [PNG_PART]}], "invalid_value"),
        ([{"role": "user", "content": "a\0b"}], "invalid_value"),
        ([{"role": "user", "content": "a" * 32_001}], "invalid_value"),
        ([{"role": "tool", "content": "a"}, user("a")], "invalid_value"),
        ([{"content": "a"}], "missing_required_parameter"),
        ([user("a") | {"more": 1}], "unknown_parameter"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "image_url": "b"}]}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "canary": 1}]}], "unknown_parameter"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "unsupported_parameter"),
        ([{"role": "user", "content": [{"type": "canary"}]}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "invalid_type"),
        ([user("a"), {"role": "assistant", "tool_calls": [{}]}], "unsupported_parameter"),
        ([{"role": "user", "content": [PNG_PART] * 5 + [{"type": "text", "text": "a"}]}], "too_many_images"),
        ([{"role": "user", "content": [PNG_PART]}] * 5 + [user("a")], "too_many_images"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}], "invalid_value"),
        ([user("a"), {"role": "user", "content": [FILE_PART, *user("a")["content"]]}], "invalid_image_url"),
    ],
)
async def test_bad_messages(client, engine, refused, monkeypatch, messages, code):
    monkeypatch.setattr("app.orders.decode_upload", pytest.fail)
    response = await client.post(URL, json={"messages": messages})
    refused(response, 400, param="messages", code=code)
    assert engine.received == []


async def test_unreadable_image_is_an_error(client, refused):
    refused(await client.post(URL, json={"messages": [user("a", b"junk")]}), 400, param="image", code="invalid_image")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("tools", [{"type": "function"}], "unsupported_parameter"),
        ("tool_choice", "required", "invalid_value"),
        ("functions", [{}], "unsupported_parameter"),
        ("logprobs", True, "invalid_value"),
        ("audio", {}, "unsupported_parameter"),
        ("web_search_options", {}, "unsupported_parameter"),
        ("modalities", ["audio"], "invalid_value"),
        ("response_format", {"type": "json_object"}, "invalid_value"),
        ("canary", 1, "unknown_parameter"),
        ("prompt", "a", "unknown_parameter"),
        ("n", 11, "invalid_value"),
        ("n", "2", "invalid_type"),
        ("temperature", "hot", "invalid_type"),
        ("size", "1x1", "invalid_value"),
        ("stream_options", {"include_progress": True}, "unknown_parameter"),
    ],
)
async def test_bad_fields(client, refused, name, value, code):
    response = await client.post(URL, json={"messages": [user("a")], name: value})
    refused(response, 400, param=name, code=code)


async def test_unknown_fields_by_setting(connect):
    client = await connect(unknown_fields="warn")
    response = await client.post(URL, json={"messages": [user("a")], "canary": 1})
    assert response.json()["warnings"] == ["Unknown parameter: 'canary'. It was ignored."]


async def test_unknown_model_and_wrong_type(client, refused):
    refused(await client.post(URL, json={"messages": [user("a")], "model": "gpt-4o"}), 404, param="model")
    refused(await client.post(URL, content=b"{}", headers={"content-type": "text/plain"}), 415)
