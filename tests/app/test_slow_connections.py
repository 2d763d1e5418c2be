"""Connections on which nothing, or not enough, comes: each is ended in time, and a healthy client notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

URL = "/v1/images/generations"
PATIENCE_S = 0.3
HEAD = f"POST {URL} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
BODY = json.dumps({"prompt": "a"}).encode()


async def opened(client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        return await reader.read()


def assert_timed_out(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert b"x-request-id: " in head.lower()
    assert json.loads(body)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health",
        b"GET /health HTTP/1.1\r\nhost: x\r\n",
        HEAD + b"content-length: 100\r\n\r\n",
        HEAD + b"content-length: 100\r\n\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
    ],
    ids=["silence", "half a line", "half a head", "no body", "half a body", "no chunk", "half a chunk"],
)
async def test_what_stops_coming_is_ended(serve, engine, sent) -> None:
    client = await serve(request_seconds=PATIENCE_S)
    reader, writer = await opened(client)
    writer.write(sent)
    assert_timed_out(await to_the_end(reader))
    writer.close()
    assert engine.received == []
    assert (await client.post(URL, json={"prompt": "a"})).status_code == 200


async def test_a_body_that_drips_is_ended(serve, engine) -> None:
    client = await serve(request_seconds=PATIENCE_S)
    reader, writer = await opened(client)
    writer.write(HEAD + b"content-length: 100000\r\n\r\n")
    answer = asyncio.create_task(to_the_end(reader))
    for _ in range(200):
        if answer.done():
            break
        writer.write(b" ")
        await asyncio.sleep(PATIENCE_S / 6)
    assert answer.done()
    with contextlib.suppress(ConnectionResetError):  # a byte that comes after the answer can take it along
        assert_timed_out(await answer)
    writer.close()


async def test_a_half_request_behind_an_answered_one_is_ended(serve, engine) -> None:
    client = await serve(request_seconds=PATIENCE_S)
    reader, writer = await opened(client)
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    await asyncio.sleep(2 * PATIENCE_S)  # an idle connection is kept
    writer.write(b"GET /health/live HT")
    assert_timed_out(await to_the_end(reader))
    writer.close()


async def test_waiting_for_an_answer_is_not_being_slow(serve, engine) -> None:
    client = await serve(request_seconds=PATIENCE_S)
    engine.may_finish.clear()
    request = asyncio.create_task(client.post(URL, json={"prompt": "a"}))
    await asyncio.sleep(3 * PATIENCE_S)
    assert engine.num_running == 1
    engine.may_finish.set()
    assert (await request).status_code == 200


async def test_a_hundred_slow_connections_leave_room(serve, engine) -> None:
    client = await serve(request_seconds=2.0)
    slow = [await opened(client) for _ in range(100)]
    for _, writer in slow:
        writer.write(HEAD)
    answers = await asyncio.gather(*(client.post(URL, json={"prompt": "a"}) for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    for reader, writer in slow:
        assert_timed_out(await to_the_end(reader))
        writer.close()
