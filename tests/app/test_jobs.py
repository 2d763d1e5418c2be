"""Background jobs: 202 at once, the answer for whoever comes for it, and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from app.images import decode_upload
from engine.errors import GenerationFailed, InvalidRequest
from tests.app.test_metrics import read

URL = "/v1/images/generations"
EDITS = "/v1/images/edits"
REQUESTS = "/v1/images/requests"
JOB = {"prompt": "a", "background_job": True, "seed": 5, "size": "96x64"}
MINE = {"x-request-id": "mine"}


async def result_of(client, request_id: str = "mine"):
    async with asyncio.timeout(60):
        while (response := await client.get(f"{REQUESTS}/{request_id}/result")).status_code == 202:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return response


async def test_a_jobs_life(client, engine, refused):
    engine.may_finish.clear()
    response = await client.post(URL, json=JOB, headers=MINE)
    assert response.status_code == 202
    assert response.headers["location"] == f"{REQUESTS}/mine"
    assert int(response.headers["retry-after"]) >= 1
    state = response.json()
    assert state == {
        **{"id": "mine", "object": "image.request", "status": "running", "position": 0, "step": 3, "num_steps": 50},
        **{"eta_seconds": 1.25, "result": f"{REQUESTS}/mine/result"},
    }
    assert (await client.get(f"{REQUESTS}/mine")).json() == state
    waiting = await client.get(state["result"])
    assert (waiting.status_code, waiting.json()) == (202, state)
    engine.may_finish.set()
    answer = await result_of(client)
    plain = await client.post(URL, json={**JOB, "background_job": False})
    assert answer.status_code == 200
    assert answer.json()["data"] == plain.json()["data"] and answer.json().keys() == plain.json().keys()
    assert answer.headers["x-request-id"] != "mine"
    state = (await client.get(f"{REQUESTS}/mine")).json()
    assert (state["status"], state["step"], state["num_steps"], state["eta_seconds"]) == ("completed", 50, 50, 0)
    assert (await client.delete(f"{REQUESTS}/mine")).json()["deleted"] is True
    refused(await client.get(f"{REQUESTS}/mine/result"), 404, code="request_not_found")
    refused(await client.get(f"{REQUESTS}/mine"), 404, code="request_not_found")
    figures = await read(client)
    assert figures["easel_requests_total", "create_image", "ok"] == 2


async def test_an_edit_as_a_job(client, png):
    fields = {"prompt": "a", "background_job": "true"}
    assert (await client.post(EDITS, data=fields, files={"image": png}, headers=MINE)).status_code == 202
    assert (await result_of(client)).json()["usage"]["input_tokens_details"]["image_tokens"] == 3


async def test_what_is_wrong_with_a_job_is_told_at_once(client, engine, refused):
    refused(await client.post(URL, json={**JOB, "size": "1x1"}, headers=MINE), 400, param="size")
    refused(await client.post(URL, json={**JOB, "stream": True}, headers=MINE), 400, param="background_job")
    engine.is_full = True
    refused(await client.post(URL, json=JOB, headers=MINE), 429, code="queue_full")
    refused(await client.get(f"{REQUESTS}/mine"), 404)


async def test_a_failed_job_keeps_its_error(client, engine, refused):
    for error, status, code in (
        (GenerationFailed("not finite"), 500, "generation_failed"),
        (InvalidRequest("too long", param="prompt"), 400, "invalid_value"),
        (RuntimeError("a secret"), 500, "internal_error"),
    ):
        engine.error = error
        assert (await client.post(URL, json=JOB, headers={"x-request-id": code})).status_code == 202
        answer = await result_of(client, code)
        refused(answer, status, param="prompt" if status == 400 else None, code=code)
        state = (await client.get(f"{REQUESTS}/{code}")).json()
        assert (state["status"], state["error"]["code"], state["step"]) == ("failed", code, 0)
        assert "secret" not in answer.text + str(state)


async def test_a_running_job_can_be_cancelled(client, engine, refused):
    engine.may_finish.clear()
    await client.post(URL, json=JOB, headers=MINE)
    assert (await client.delete(f"{REQUESTS}/mine")).status_code == 200
    refused(await result_of(client), 499, code="request_cancelled")
    assert (await read(client))["easel_requests_total", "create_image", "cancelled"] == 1
    assert (await client.delete(f"{REQUESTS}/mine")).status_code == 200
    refused(await client.delete(f"{REQUESTS}/mine"), 404)


async def test_one_id_one_job(client, engine, refused):
    engine.may_finish.clear()
    first, second = await asyncio.gather(*(client.post(URL, json=JOB, headers=MINE) for _ in range(2)))
    assert sorted((first.status_code, second.status_code)) == [202, 409]
    refused(second if second.status_code == 409 else first, 409, param="x-request-id", code="duplicate_request")
    assert engine.num_cancelled == 1
    engine.may_finish.set()
    await result_of(client)
    assert (await client.post(URL, json=JOB, headers=MINE)).status_code == 409


async def test_answers_are_bounded_in_number_bytes_and_age(connect, refused):
    for bounds in ({"max_jobs": 2}, {"job_store_bytes": 1}, {"job_seconds": 0.001}):
        client = await connect(**bounds)
        for name in "abc":
            await client.post(URL, json=JOB, headers={"x-request-id": name})
            await result_of(client, name)
        await asyncio.sleep(0.002)
        refused(await client.get(f"{REQUESTS}/a/result"), 404)
        assert (await client.get(f"{REQUESTS}/c/result")).status_code == (404 if "job_seconds" in bounds else 200)


async def test_a_clients_read_timeout_is_not_the_jobs(client, engine):
    await client.post(URL, json=JOB, headers={**MINE, "x-stainless-read-timeout": "10"})
    await result_of(client)
    assert engine.received[0].timeout_s is None


async def test_a_job_in_the_shape_that_its_client_accepts(client):
    await client.post(URL, json=JOB, headers={**MINE, "accept": "image/webp"})
    answer = await result_of(client)
    assert answer.headers["content-type"] == "image/webp"
    assert decode_upload(answer.content, max_pixels=10_000).size == (96, 64)


async def test_a_job_that_runs_when_the_service_ends_ends_with_it(connect, engine):
    client = await connect()
    engine.may_finish.clear()
    await client.post(URL, json=JOB, headers=MINE)
    assert engine.num_running == 1  # the fixture stops the application; a task left behind would be reported


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_unknown_job(client, refused, method):
    refused(await client.request(method, f"{REQUESTS}/no-such"), 404, code="request_not_found")
    refused(await client.get(f"{REQUESTS}/no-such/result"), 404, code="request_not_found")
