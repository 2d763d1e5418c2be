"""Workers that are killed and services that are told to stop, again and again, while clients keep asking."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np

from tests.e2e.endurance import (
    RESTART_TIMEOUT_S,
    SAME_PICTURE_DB,
    URL,
    body,
    client_of,
    counters,
    drawn_alone,
    pixels_of,
    record,
    scaled,
    until_ready,
)
from tests.oracle import psnr_db
from tests.server import Server, assert_gone, serving

NUM_CLIENTS = 8
STEPS = {"num_inference_steps": 20}


async def kill_worker(server: Server, client: httpx.AsyncClient) -> float:
    """Kill it in the middle of something; the seconds until the service is ready again."""
    async with asyncio.timeout(RESTART_TIMEOUT_S):
        while (await client.get("/health/ready")).json().get("running", 0) == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(random.uniform(0.0, 1.0))
    [worker] = server.workers()
    started_s = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    await asyncio.to_thread(assert_gone, [worker])
    await until_ready(client, status=503)
    await until_ready(client)
    return time.monotonic() - started_s


async def test_workers_killed_under_load_lose_nothing_and_answer_nothing_twice(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Every request that was admitted gets its own picture, once; others hear 503 while there is no worker."""
    statuses: Counter[int] = Counter()
    worst_db, stopping = float("inf"), False
    started_s = time.monotonic()
    with serving(checkpoint, tmp_path, "--max-queue", "16") as server:
        load_s = time.monotonic() - started_s
        async with client_of(server) as client:
            alone = [await drawn_alone(client, seed, **STEPS) for seed in range(4 * NUM_CLIENTS)]
            children, counted = len(server.children()), await counters(client)

            async def keep_asking(number: int) -> None:
                nonlocal worst_db
                seed = number
                while not stopping:
                    response = await client.post(URL, json=body(seed, **STEPS))
                    statuses[response.status_code] += 1
                    if response.status_code == 200:
                        worst_db = min(worst_db, psnr_db(pixels_of(response), alone[seed]))
                        seed = (seed + NUM_CLIENTS) % len(alone)
                    else:
                        assert int(response.headers["retry-after"]) >= 1
                        await asyncio.sleep(0.2)

            tasks = [asyncio.create_task(keep_asking(number)) for number in range(NUM_CLIENTS)]
            kills = scaled(20, least=2)
            restarts_s = [await kill_worker(server, client) for _ in range(kills)]
            stopping = True
            await asyncio.gather(*tasks)
            now = await counters(client)
            grown = {key: now[key] - counted.get(key, 0) for key in now}
            assert len(server.children()) == children
    record(
        "kills",
        kills=kills,
        statuses=dict(statuses),
        worst_psnr_db=round(worst_db, 1),
        first_start_s=round(load_s, 1),
        longest_restart_s=round(max(restarts_s), 1),
    )
    assert statuses.keys() <= {200, 503} and statuses[200] >= NUM_CLIENTS
    assert worst_db > SAME_PICTURE_DB
    assert grown["easel_worker_restarts_total",] == kills
    assert grown["easel_requests_total", "create_image", "ok"] == statuses[200] == grown["easel_images_total",]


class Round:
    """One service that is told to stop while clients ask: how their requests ended, by when they were sent."""

    def __init__(self) -> None:
        self.told_s = float("inf")
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()

    async def keep_asking(self, client: httpx.AsyncClient, seed: int, alone: np.ndarray) -> None:
        """Until the service takes no more."""
        outcome = "200"
        while outcome in ("200", "429"):
            sent_s = time.monotonic()
            try:
                response = await client.post(URL, json=body(seed, **STEPS))
                outcome = str(response.status_code)
                if outcome == "200" and psnr_db(pixels_of(response), alone) <= SAME_PICTURE_DB:
                    outcome = "another picture"
            except httpx.ConnectError:
                outcome = "refused"
            except httpx.TransportError as error:
                outcome = type(error).__name__
            (self.before if sent_s < self.told_s else self.after)[outcome] += 1


async def stop_once(checkpoint: Path, folder: Path) -> Round:
    this = Round()
    with serving(checkpoint, folder, "--drain-seconds", "60") as server:
        children = server.children()
        async with client_of(server) as client:
            alone = [await drawn_alone(client, seed, **STEPS) for seed in range(NUM_CLIENTS)]
            tasks = [asyncio.create_task(this.keep_asking(client, seed, alone[seed])) for seed in range(NUM_CLIENTS)]
            await asyncio.sleep(random.uniform(0.0, 1.0))
            this.told_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
        status = await asyncio.to_thread(server.process.wait, RESTART_TIMEOUT_S)
        assert status == 0, server.log
        await asyncio.to_thread(assert_gone, children)
    assert "Traceback" not in server.log
    return this


async def test_services_that_are_told_to_stop_drop_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Whoever asked before the signal is answered; later ones hear 503, or find nobody any more."""
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    rounds = scaled(50)
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        one = await stop_once(checkpoint, folder)
        before += one.before
        after += one.after
    record("sigterm", rounds=rounds, sent_before=dict(before), sent_after=dict(after))
    assert before.keys() <= {"200", "503"} and before["200"] >= rounds
    assert after.keys() <= {"200", "503", "refused"}
