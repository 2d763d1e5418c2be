"""A server under many clients, impatient clients, and a long row of small requests: nothing lost, nothing kept."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.endurance import (
    SAME_PICTURE_DB,
    SCALE,
    URL,
    at_rest,
    body,
    client_of,
    drawn_alone,
    pixels_of,
    record,
    scaled,
)
from tests.oracle import psnr_db
from tests.server import Server, serving

NUM_CLIENTS = 64


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoint, tmp_path_factory.mktemp("server"), "--max-queue", "16") as server:
        yield server


async def test_more_clients_than_places_get_200_or_429_and_their_own_picture(server: Server) -> None:
    """64 clients, a queue of 16: each answer is the same picture as alone, or a refusal that says when to come back."""
    statuses: Counter[int] = Counter()
    sent, worst_db = 0, float("inf")
    async with client_of(server) as client:
        seeds = range(NUM_CLIENTS * scaled(8))
        alone = {seed: await drawn_alone(client, seed, prompt=f"picture {seed % 7}") for seed in seeds}
        deadline_s = time.monotonic() + 60 * SCALE

        async def patient(number: int) -> None:
            nonlocal sent, worst_db
            seed = number
            while time.monotonic() < deadline_s:
                sent += 1
                response = await client.post(URL, json=body(seed, prompt=f"picture {seed % 7}"))
                statuses[response.status_code] += 1
                if response.status_code == 200:
                    worst_db = min(worst_db, psnr_db(pixels_of(response), alone[seed]))
                    seed = (seed + NUM_CLIENTS) % len(alone)
                else:
                    assert int(response.headers["retry-after"]) >= 1, response.text
                    await asyncio.sleep(random.uniform(0.05, 0.3))

        await asyncio.gather(*(patient(number) for number in range(NUM_CLIENTS)))
    record("clients", seconds=60 * SCALE, sent=sent, statuses=dict(statuses), worst_psnr_db=round(worst_db, 1))
    assert statuses.keys() == {200, 429} and statuses.total() == sent
    assert statuses[200] > 20
    assert worst_db > SAME_PICTURE_DB


async def test_disconnects_at_random_moments_leave_nothing_behind(server: Server) -> None:
    async def leaves(client: httpx.AsyncClient, seed: int) -> bool:
        size = random.choice(["64x64", "128x128", "96x160"])
        request = body(seed, size=size, num_inference_steps=random.randint(1, 30))
        try:
            await asyncio.wait_for(client.post(URL, json=request), random.uniform(0.0, 0.25))
        except TimeoutError:
            return True
        return False  # it had its answer before

    async def disconnects_then_requests() -> Counter[int]:
        gone = 0
        async with client_of(server) as client:
            while gone < scaled(1000):
                gone += sum(await asyncio.gather(*(leaves(client, seed) for seed in range(gone, gone + 12))))
            return Counter([(await client.post(URL, json=body(seed))).status_code for seed in range(scaled(100))])

    await disconnects_then_requests()  # until buffers have found their size
    before = await at_rest(server)
    statuses = await disconnects_then_requests()
    after = (await at_rest(server)).since(before)
    async with client_of(server) as client:
        state = (await client.get("/health")).json()
    record("disconnects", disconnects=scaled(1000), then=dict(statuses), **after)
    assert statuses == {200: scaled(100)}
    assert state == {"status": "ready", "running": 0, "waiting": 0}
    assert after["rss_growth_mib"] <= (1 if SCALE >= 1 else 10)  # a short run still finds its size
    assert after["descriptors_growth"] <= 0 and after["threads_growth"] <= 0


async def test_a_long_row_of_small_requests_leaves_memory_and_descriptors_flat(server: Server) -> None:
    async def draw(count: int) -> Counter[int]:
        async with client_of(server) as client:
            requests = (body(seed, num_inference_steps=1) for seed in range(count))
            return Counter([(await client.post(URL, json=request)).status_code for request in requests])

    await draw(scaled(500))
    before = await at_rest(server)
    statuses = await draw(scaled(10_000))
    after = (await at_rest(server)).since(before)
    record("sequential", statuses=dict(statuses), **after)
    assert statuses == {200: scaled(10_000)}
    assert after["rss_growth_mib"] <= 50
    assert after["descriptors_growth"] <= 0 and after["threads_growth"] <= 0
