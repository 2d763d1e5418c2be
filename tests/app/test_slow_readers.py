"""Clients that do not take their answers: each is cut off in time, and what was made for it is given up."""

from __future__ import annotations

import asyncio
import json
import socket

import numpy as np
import pytest

from tests.waiting import until

URL = "/v1/images/generations"
PATIENCE_S = 0.3
ORDER = {"prompt": "a", "size": "1024x1024"}  # of noise: more than the sockets of both sides hold


@pytest.fixture
def engine(engine):
    def noise(width: int, height: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)

    engine.draw = noise
    return engine


async def ask(client, order: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send `order` over a connection of which nothing is read, unless with the reader."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (client.base_url.host, client.base_url.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=4096)
    body = json.dumps(order).encode()
    head = f"POST {URL} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def read_all(reader: asyncio.StreamReader, pause_s: float = 0) -> int:
    """The number of bytes that come before the connection ends, by reading a little at a time."""
    total = 0
    try:
        while piece := await reader.read(65_536):
            total += len(piece)
            await asyncio.sleep(pause_s)
    except ConnectionError:
        pass
    return total


async def test_an_answer_that_nobody_takes_is_dropped(serve, engine) -> None:
    client = await serve(answer_seconds=PATIENCE_S)
    whole = len((await client.post(URL, json=ORDER)).content)
    reader, writer = await ask(client, ORDER)
    await until(lambda: len(engine.received) == 2)
    await asyncio.sleep(4 * PATIENCE_S)
    assert await read_all(reader) < whole / 2
    writer.close()
    assert (await client.post(URL, json=ORDER)).status_code == 200


async def test_a_stream_that_nobody_takes_is_cancelled(serve, engine) -> None:
    client = await serve(answer_seconds=PATIENCE_S)
    engine.may_finish.clear()
    _, writer = await ask(client, {**ORDER, "stream": True, "partial_images": 2})
    await until(lambda: engine.num_running == 1)
    await until(lambda: engine.num_running == 0)
    assert engine.num_cancelled == 1
    writer.close()


async def test_a_client_that_takes_its_time_gets_all(serve, engine) -> None:
    client = await serve(answer_seconds=PATIENCE_S)
    whole = len((await client.post(URL, json=ORDER)).content)
    reader, writer = await ask(client, ORDER)
    reading = asyncio.create_task(read_all(reader, PATIENCE_S / 100))
    done, _ = await asyncio.wait({reading}, timeout=3 * PATIENCE_S)
    assert not done  # it takes many times as long as one that takes nothing is waited for
    assert await reading > whole
    writer.close()
