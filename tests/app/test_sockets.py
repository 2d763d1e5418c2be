"""Over a real socket: what an in-memory transport can't show."""

from __future__ import annotations

import asyncio
import io
import socket

import pytest
from PIL import Image

from app.launch import listen
from tests.waiting import until

URL = "/v1/images/generations"


async def test_a_client_that_leaves_cancels_its_request(serve, engine):
    client = await serve()
    engine.may_finish.clear()
    request = asyncio.create_task(client.post(URL, json={"prompt": "a"}))
    await until(lambda: engine.num_running == 1)
    request.cancel()
    await until(lambda: engine.num_running == 0)
    assert engine.num_cancelled == 1
    engine.may_finish.set()
    assert (await client.post(URL, json={"prompt": "a"})).status_code == 200


async def test_many_clients_that_leave_do_no_harm(serve, engine):
    client = await serve()
    tasks = len(asyncio.all_tasks())
    engine.may_finish.clear()
    requests = [asyncio.create_task(client.post(URL, json={"prompt": "a"})) for _ in range(60)]
    await until(lambda: engine.num_running == 60)
    for request in requests:
        request.cancel()
    await until(lambda: engine.num_running == 0)
    engine.may_finish.set()
    answers = await asyncio.gather(*(client.post(URL, json={"prompt": "a"}) for _ in range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_an_edit_over_the_wire(serve, engine, encoded, opened):
    client = await serve()
    picture = Image.fromarray(engine.draw(500, 400, 3))
    files = [("image[]", ("upload", io.BytesIO(encoded(picture)), "application/octet-stream"))] * 2
    response = await client.post("/v1/images/edits", data={"prompt": "a", "size": "100x90"}, files=files)
    assert opened(response).size == (100, 90)
    assert [image.size for image in engine.received[0].condition_images] == [(500, 400)] * 2


async def raw_exchange(client, head: bytes, chunk: bytes, max_chunks: int) -> tuple[bytes, int]:
    """Send `head`, then `chunk` again and again until an answer comes; return it and the number of chunks."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(head)
    answer = asyncio.create_task(reader.read(4096))
    sent = 0
    while not answer.done() and sent < max_chunks:
        writer.write(chunk)
        await writer.drain()
        await asyncio.sleep(0)
        sent += 1
    async with asyncio.timeout(5):
        text = await answer
    writer.close()
    return text, sent


@pytest.mark.parametrize("path", [URL, "/v1/images/edits"])
async def test_endless_chunked_body_is_413_while_it_arrives(serve, path):
    client = await serve(max_body_bytes=2**20)
    kind = "application/json" if path == URL else "multipart/form-data; boundary=frontier"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"\r\n" * 2**15 + b"\r\n"
    answer, sent = await raw_exchange(client, head.encode(), chunk, 1000)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"payload_too_large" in answer
    assert sent < 500
    assert (await client.get("/health/ready")).status_code == 200


async def test_declared_length_over_the_limit_is_413_before_the_body(serve):
    client = await serve(max_body_bytes=1000)
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
    answer, sent = await raw_exchange(client, head.encode(), b"", 0)
    assert answer.startswith(b"HTTP/1.1 413")
    assert sent == 0


@pytest.mark.parametrize("path", [b"/%00", b"/%1b[31m", b"/%0d%0aX-Evil: 1", b"/\xff"])
async def test_control_characters_in_a_path_are_harmless(serve, path):
    client = await serve()
    answer, _ = await raw_exchange(client, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"", 0)
    assert answer.split(b" ", 2)[1] in (b"404", b"400")
    assert b"evil" not in answer.lower()


async def test_body_cut_off_by_the_client_is_no_request(serve, engine):
    client = await serve()
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    writer.write(head.encode() + b'{"prompt": "a"')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)
    assert engine.received == []
    assert (await client.get("/health/ready")).status_code == 200


def test_answers_are_not_held_back():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
