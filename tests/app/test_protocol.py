"""What is no HTTP gets the envelope too, and never reaches a route."""

from __future__ import annotations

import asyncio
import json

import pytest

POST = b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def exchange(client, *pieces: bytes) -> bytes:
    """Everything that comes back on a connection over which `pieces` were sent."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02)  # so that each piece is read by itself
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "pieces",
    [
        [b"nonsense\r\n\r\n"],
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n"],
        [b"GET /v1/models HTTP/1.1\r\n\r\n"],
        [b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000, b"a" * 100_000],
        [POST + b"content-length: -1\r\n\r\n"],
        [POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n"],
        [POST + b"transfer-encoding: gzip, chunked\r\n\r\n"],
        [POST + b"transfer-encoding: chunked\r\n\r\n", b"zz\r\n"],
    ],
    ids=range(10),
)
async def test_malformed_requests(serve, engine, pieces):
    client = await serve()
    head, _, body = (await exchange(client, *pieces)).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"\r\nx-request-id: req_" in head.lower() + b"\r\n"
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_http", None)
    assert len(body) < 2048 and engine.received == []
    assert (await client.get("/health/live")).status_code == 200


async def test_nonsense_behind_a_request_spoils_no_answer(serve):
    client = await serve()
    answer = await exchange(client, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b'{"status":"live"}HTTP/1.1 400 ' in answer
