"""Faults in a server that really runs: what goes wrong in one request's work, or in the worker, nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.endurance import (
    SAME_PICTURE_DB,
    URL,
    body,
    client_of,
    counters,
    drawn_alone,
    pixels_of,
    until_ready,
)
from tests.engine import faults
from tests.oracle import psnr_db
from tests.server import START_TIMEOUT_S, Server, assert_gone, is_gone, serving

STEPS = {"num_inference_steps": 14}
GOOD_SEEDS = (1, 2)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(checkpoint, folder, "--hang-timeout-seconds", "6", module="tests.faulty_server") as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as client:
        yield client


@pytest.fixture
async def alone(client: httpx.AsyncClient) -> list[np.ndarray]:
    return [await drawn_alone(client, seed, **STEPS) for seed in GOOD_SEEDS]


async def together(client: httpx.AsyncClient, seed: int, alone: list[np.ndarray]) -> httpx.Response:
    """The answer to the request with `seed`, sent among good ones, which all get their own pictures; and the next
    request as well."""
    first, last = GOOD_SEEDS
    requests = (client.post(URL, json=body(each, **STEPS)) for each in (first, seed, last))
    before, answer, after = await asyncio.gather(*requests)
    await until_ready(client)  # some faults take the worker along
    again = await client.post(URL, json=body(first, **STEPS))
    for response, expected in ((before, alone[0]), (after, alone[1]), (again, alone[0])):
        assert response.status_code == 200, response.text
        assert psnr_db(pixels_of(response), expected) > SAME_PICTURE_DB
    assert (await client.get("/health/ready")).json() == {"status": "ready", "running": 0, "waiting": 0}
    return answer


def assert_error(answer: httpx.Response, code: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", code)
    assert answer.headers["x-request-id"] and answer.headers["x-should-retry"] == "false"
    assert len(answer.content) < 2048
    assert not any(word in answer.text for word in ("secret", "Traceback", "/", ".py"))


@pytest.mark.parametrize(("seed", "code"), faults.FAILS_ALONE.items())
async def test_a_request_at_fault_fails_alone(
    client: httpx.AsyncClient, alone: list[np.ndarray], seed: int, code: str
) -> None:
    assert_error(await together(client, seed, alone), code)


async def test_a_disk_that_is_full_in_the_middle_of_a_picture_is_not_ready(
    client: httpx.AsyncClient, alone: list[np.ndarray]
) -> None:
    answer = await together(client, faults.DISK_FULL_AT_STEP_2, alone)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert int(answer.headers["retry-after"]) >= 1
    assert "secret" not in answer.text


async def test_a_batch_that_does_not_fit_is_made_smaller(client: httpx.AsyncClient, alone: list[np.ndarray]) -> None:
    assert (await together(client, faults.OOM_IN_BATCHES, alone)).status_code == 200


@pytest.mark.parametrize("seed", [faults.ABORT_AT_STEP_2, faults.LOSE_DEVICE_AT_STEP_2, faults.HANG_AT_STEP_2])
async def test_a_request_that_ends_two_workers_fails_alone(
    server: Server, client: httpx.AsyncClient, alone: list[np.ndarray], seed: int
) -> None:
    before = await counters(client)
    [worker] = server.workers()
    assert_error(await together(client, seed, alone), "worker_died")
    assert (await counters(client))["easel_worker_restarts_total",] == before["easel_worker_restarts_total",] + 2
    assert is_gone(worker) and len(server.workers()) == 1


async def test_a_stopped_worker_is_found_and_replaced(
    server: Server, client: httpx.AsyncClient, alone: list[np.ndarray]
) -> None:
    waiting = asyncio.create_task(client.post(URL, json=body(GOOD_SEEDS[0], num_inference_steps=14, n=10)))
    while (await client.get("/health/ready")).json()["running"] == 0:  # noqa: ASYNC110 it is only seen from outside
        await asyncio.sleep(0.01)
    [worker] = server.workers()
    os.kill(worker, signal.SIGSTOP)
    answer = await waiting
    assert answer.status_code == 200, answer.text
    assert psnr_db(pixels_of(answer), alone[0]) > SAME_PICTURE_DB
    assert is_gone(worker) and len(server.workers()) == 1


def cut_short(folder: Path) -> str:
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "vae/diffusion_pytorch_model.safetensors"


def reshape(folder: Path) -> str:
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(file), "img_in.weight": torch.zeros(3, 5)}, file)
    return "transformer/diffusion_pytorch_model.safetensors"


def rename_class(folder: Path) -> str:
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": "FluxPipeline"}))
    return "model_index.json"


@pytest.mark.parametrize("damage", [cut_short, reshape, rename_class])
def test_a_checkpoint_that_can_not_be_loaded_ends_the_service(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    file = damage(copy)
    seen, deadline_s = set(), time.monotonic() + START_TIMEOUT_S
    with serving(copy, tmp_path, ready=False) as server:
        while server.process.poll() is None:
            assert time.monotonic() < deadline_s
            with contextlib.suppress(httpx.TransportError):
                seen.add(httpx.get(f"{server.url}/health/ready", timeout=5).status_code)
            time.sleep(0.05)
        assert server.process.returncode == 1
        assert_gone(server.children())
    assert seen <= {503}
    last_line = server.log.splitlines()[-1]
    assert last_line.startswith("easel: the model could not be loaded: ") and file in last_line
