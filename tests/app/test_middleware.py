"""What holds on every route: ids, keys, limits, and the envelope around every failure."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import threading

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from app import image_events, orders, render
from app.main import create_app
from app.settings import Settings
from engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    GenerationFailed,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestCancelled,
)
from tests.waiting import until

URL = "/v1/images/generations"
FAILURES = ("generation_failed", "out_of_memory", "internal_error", "worker_died")
PROBES = {"/health", "/health/live", "/health/ready", "/v1/health"}


@pytest.mark.parametrize("own_id", ["a", "A-b_c.9", "x" * 64])
async def test_the_clients_request_id_is_kept(client, engine, own_id):
    response = await client.post(URL, json={"prompt": "a"}, headers={"x-request-id": own_id})
    assert response.headers["x-request-id"] == own_id
    assert engine.request_ids == [own_id]


@pytest.mark.parametrize("own_id", ["", "a b", "x" * 65, "../x", "a\tb", "é".encode("latin-1"), "a\x1b[31m"])
async def test_an_unsafe_request_id_is_replaced(client, own_id):
    ids = set()
    for path in ("/health/live", "/nowhere"):
        response = await client.get(path, headers={"x-request-id": own_id})
        ids.add(response.headers["x-request-id"])
    assert len(ids) == 2
    assert all(request_id.startswith("req_") for request_id in ids)


def routes_of(app):
    """Every (method, path) of the application, with something in place of path parameters, and paths it lacks."""
    table = [
        (method, re.sub(r"\{[^}]+\}", "x", route.path))
        for route in iter_route_contexts(app.routes)
        for method in route.methods
    ]
    assert len(table) >= 9
    assert "{" not in str(table)
    return [*table, *(("GET", path) for path in ("/nowhere", "/health/", "/health/live/x"))]


@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer ", "Basic one", "one", "Bearer on", "Bearer one two", "Bearer onë"]
)
async def test_every_route_but_the_probes_asks_for_a_key(connect, engine, refused, authorization):
    client = await connect(api_key=("one", "two-ü"))
    headers = {"authorization": authorization.encode("latin-1")} if authorization else {}
    routes = routes_of(create_app(Settings(), engine))
    ours = {URL, "/v1/images/edits", "/v1/models", "/metrics", "/openapi.json", "/", "/playground/x"}
    assert {path for _, path in routes} >= ours | PROBES
    for method, path in routes:
        response = await client.request(method, path, headers=headers)
        if path in PROBES:
            assert response.status_code == 200
        elif method == "HEAD":
            assert response.status_code == 401
        else:
            refused(response, 401, code="invalid_api_key")


@pytest.mark.parametrize("key", ["one", "two-ü"])
async def test_each_key_opens(connect, key):
    client = await connect(api_key=("one", "two-ü"))
    for scheme in ("Bearer", "bearer"):
        response = await client.get("/v1/models", headers={"authorization": f"{scheme} {key}".encode()})
        assert response.status_code == 200


def basic(credentials):
    return {"authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}


@pytest.mark.parametrize("credentials", ["anyone:one", "one:", ":two-ü", ":with:colons"])
async def test_a_browser_is_asked_for_a_key_and_sends_it_in_its_own_way(connect, refused, credentials):
    client = await connect(api_key=("one", "two-ü", "with:colons"))
    page = await client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    refused(page, 401, code="invalid_api_key")
    assert page.headers["www-authenticate"].startswith('Basic realm="')
    script = await client.get("/v1/models", headers={"accept": "*/*"})
    assert (script.status_code, script.headers["www-authenticate"]) == (401, "Bearer")  # no dialog over the page
    for path in ("/", "/playground/main.js", "/v1/models"):
        assert (await client.get(path, headers=basic(credentials))).status_code == 200


@pytest.mark.parametrize("credentials", ["", ":", "wrong", "anyone:wrong", "one:wrong", "anyone:one:"])
async def test_wrong_basic_credentials_are_refused(connect, refused, credentials):
    client = await connect(api_key=("one",))
    refused(await client.get("/", headers=basic(credentials)), 401, code="invalid_api_key")


async def test_a_form_of_another_site_can_not_use_the_browsers_credentials(connect, refused):
    client = await connect(api_key=("one",))
    form = {"prompt": (None, "a"), "seed": (None, "1")}
    refused(await client.post("/v1/images/edits", files=form, headers=basic(":one")), 401, code="invalid_api_key")
    own = {**basic(":one"), "x-request-id": "page"}  # what a form can't send
    assert (await client.post(URL, json={"prompt": "a"}, headers=own)).status_code == 200
    refused(await client.delete("/v1/images/requests/a", headers=basic(":one")), 404)


async def test_unknown_path_and_wrong_method_are_in_the_envelope(client, refused):
    for path in ("/nowhere", "/v1/images/generations/", "/docs", "/a\x07b", "/%00", "/%0d%0ax"):
        refused(await client.get(path.replace("\x07", "%07")), 404, code="route_not_found")
    response = await client.get(URL)
    refused(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_every_method_on_every_route_has_an_answer(client, engine, refused):
    for path in {path for _, path in routes_of(create_app(Settings(), engine))}:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO"):
            response = await client.request(method, path)
            assert response.status_code < 500 and response.headers["x-request-id"], (method, path)
            if method == "HEAD":
                assert not response.content
            elif response.status_code >= 400:
                refused(response, response.status_code, param=response.json()["error"]["param"])
    assert engine.received == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("too long", param="prompt"), 400, "invalid_value"),
        (QueueFull("full", retry_after_s=2.25), 429, "queue_full"),
        (NotReady("restarting", retry_after_s=0.5), 503, "not_ready"),
        (EngineStopped("stopped"), 503, "stopped"),
        *((GenerationFailed("broken", code=code), 500, code) for code in FAILURES),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
        (RequestCancelled("cancelled"), 499, "request_cancelled"),
    ],
)
async def test_engine_errors_in_http(client, engine, refused, error, status, code):
    engine.error = error
    response = await client.post(URL, json={"prompt": "a"})
    refused(response, status, code=code, param="prompt" if status == 400 else None)
    assert (response.headers.get("x-should-retry") == "false") == (status in (499, 500, 504))
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if status == 429:
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2250")
    engine.error = None
    assert (await client.post(URL, json={"prompt": "a"})).status_code == 200


async def test_a_long_wait_is_told_as_one_that_the_sdk_heeds(client, engine):
    engine.error = QueueFull("full", retry_after_s=500.0)
    response = await client.post(URL, json={"prompt": "a"})
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("60", "60000")


async def test_engine_names_of_fields_become_the_clients(client, engine, refused):
    engine.error = InvalidRequest("too small", param="condition_images")
    refused(await client.post(URL, json={"prompt": "a"}), 400, param="image")


async def test_unforeseen_exception_is_a_500_with_an_id_and_a_log_line(client, engine, refused, caplog):
    engine.error = RuntimeError("secret detail in /some/path")
    with caplog.at_level(logging.ERROR):
        response = await client.post(URL, json={"prompt": "a"}, headers={"x-request-id": "mine"})
    refused(response, 500, code="internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "mine"
    [record] = caplog.records
    assert record.request_id == "mine"
    assert "secret detail" in str(record.exc_info[1])


async def test_declared_length_over_the_limit_is_413_unread(connect, refused):
    client = await connect(max_body_bytes=1000)

    async def unread():
        raise AssertionError("the body was read")
        yield b""

    headers = {"content-type": "application/json", "content-length": "1001"}
    refused(await client.post(URL, content=unread(), headers=headers), 413)


async def test_body_at_the_limit_is_taken(connect):
    body = b'{"prompt": "a"}'
    client = await connect(max_body_bytes=len(body))
    headers = {"content-type": "application/json"}
    assert (await client.post(URL, content=body, headers=headers)).status_code == 200
    assert (await client.post(URL, content=body + b" ", headers=headers)).status_code == 413


@pytest.mark.parametrize("has_length", [True, False])
async def test_all_bodies_together_are_bounded_until_they_are_answered(connect, engine, refused, has_length):
    client = await connect(max_body_bytes=3000, max_bodies_bytes=5000)

    async def in_parts(body: bytes):
        yield body[:1000]
        yield body[1000:]

    async def post(num_bytes: int) -> httpx.Response:
        body = b'{"prompt": "a"}'.ljust(num_bytes)
        headers = {"content-type": "application/json"}
        return await client.post(URL, content=body if has_length else in_parts(body), headers=headers)

    engine.may_finish.clear()
    first = asyncio.create_task(post(3000))
    await until(lambda: engine.pending)
    error = refused(await post(2500), 429, code="too_many_bodies")
    assert error.get("param") is None
    second = asyncio.create_task(post(1900))
    await until(lambda: len(engine.pending) == 2)
    engine.may_finish.set()
    assert [(await task).status_code for task in (first, second)] == [200, 200]
    assert (await post(3000)).status_code == 200


async def test_requests_without_a_body_are_answered_where_bodies_fill_their_memory(connect, engine):
    body = b'{"prompt": "a"}'
    client = await connect(max_body_bytes=len(body), max_bodies_bytes=len(body))
    engine.may_finish.clear()
    first = asyncio.create_task(client.post(URL, content=body, headers={"content-type": "application/json"}))
    await until(lambda: engine.pending)
    assert (await client.get("/health/live")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200
    engine.may_finish.set()
    assert (await first).status_code == 200


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_pictures_are_decoded_and_encoded_off_the_event_loop(client, engine, png, monkeypatch, stream):
    seen = {}
    for module, name in ((orders, "decode_upload"), (render, "encode"), (image_events, "event")):
        original = getattr(module, name)

        def spy(*args, _original=original, _name=name, **options):
            seen[_name] = threading.current_thread()
            return _original(*args, **options)

        monkeypatch.setattr(module, name, spy)
    fields = {"prompt": "a", "stream": stream, "partial_images": "1"}
    response = await client.post("/v1/images/edits", data=fields, files={"image": png})
    assert response.status_code == 200
    assert seen.keys() == {"decode_upload", "encode", *(["event"] if stream == "true" else [])}
    assert threading.main_thread() not in seen.values()
