"""Requests by their id, and the time that a client gives them."""

from __future__ import annotations

import asyncio

import pytest

URL = "/v1/images/generations"
REQUESTS = "/v1/images/requests"
BAD_IDS = ["no-such", "x" * 65, "a%20b", "%00", "%1b[31m", "%E2%80%AE", "..%2f..%2fmetrics", "a/b", "%2e%2e"]


@pytest.fixture
async def held(client, engine):
    """A request that runs until it is cancelled or let go; its answer."""
    engine.may_finish.clear()
    answer = asyncio.create_task(client.post(URL, json={"prompt": "a"}, headers={"x-request-id": "mine"}))
    while not engine.pending:  # noqa: ASYNC110
        await asyncio.sleep(0)
    yield answer
    engine.may_finish.set()
    await answer


async def test_state(client, engine, held):
    response = await client.get(f"{REQUESTS}/mine")
    assert response.json() == {
        "id": "mine",
        "object": "image.request",
        "status": "running",
        "position": 0,
        "step": 3,
        "num_steps": 50,
        "eta_seconds": 1.25,
    }
    engine.may_finish.set()
    assert (await held).status_code == 200
    assert (await client.get(f"{REQUESTS}/mine")).status_code == 404


async def test_cancel(client, held, refused):
    response = await client.delete(f"{REQUESTS}/mine")
    assert response.json() == {"id": "mine", "object": "image.request", "deleted": True}
    answer = await held
    refused(answer, 499, code="request_cancelled")
    assert answer.headers["x-should-retry"] == "false"
    refused(await client.delete(f"{REQUESTS}/mine"), 404, code="request_not_found")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("bad_id", BAD_IDS)
async def test_unknown_id_is_404_without_an_echo(client, refused, method, bad_id):
    response = await client.request(method, f"{REQUESTS}/{bad_id}")
    assert refused(response, 404)["code"] in ("request_not_found", "route_not_found")
    assert "x" * 65 not in response.text


@pytest.mark.parametrize(
    ("asked", "announced", "effective"),
    [
        (None, "600", 599.5),
        (None, "600.0", 599.5),
        (None, "2", 1.8),
        (None, "0.5", 0.45),
        (20, "10", 9.5),
        (5, "10", 5.0),
        (5, None, 5.0),
        *((5, text, 5.0) for text in ("", "NOT_GIVEN", "None", "0", "0.0", "-1", "nan", "inf", "1e3", "١", "9" * 400)),
        *((None, text, None) for text in ("NOT_GIVEN", "soon", " ", "0")),
    ],
)
async def test_the_shorter_time_limit_holds(client, engine, asked, announced, effective):
    headers = {} if announced is None else {"x-stainless-read-timeout": announced.encode()}
    response = await client.post(URL, json={"prompt": "a", "timeout_s": asked}, headers=headers)
    assert response.status_code == 200
    assert engine.received[0].timeout_s == (None if effective is None else pytest.approx(effective))
