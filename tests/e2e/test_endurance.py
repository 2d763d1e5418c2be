"""A server under many clients, impatient clients, and a long row of small requests: nothing lost, nothing kept."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.oracle import psnr_db
from tests.server import Server, serving

SCALE = float(os.environ.get("ENDURANCE_SCALE", "0.1"))  # 1 for the full counts: 1,000 disconnects, 10,000 requests
URL = "/v1/images/generations"
SMALL = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 2}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoint, tmp_path_factory.mktemp("server"), "--max-queue", "16") as server:
        yield server


def client_of(server: Server, connections: int = 100) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


def body(seed: int, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "seed": seed, **changes}


def pixels_of(response: httpx.Response) -> np.ndarray:
    encoded = response.json()["data"][0]["b64_json"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA"))


class Footprint:
    """Memory, descriptors and threads of the server and its worker."""

    def __init__(self, server: Server) -> None:
        pids = [server.process.pid, *server.children()]
        self.rss_mib = sum(self.status(pid, "VmRSS") for pid in pids) / 1024
        self.descriptors = sum(1 for pid in pids for _ in Path(f"/proc/{pid}/fd").iterdir())
        self.threads = sum(self.status(pid, "Threads") for pid in pids)

    @staticmethod
    def status(pid: int, name: str) -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


async def test_more_clients_than_places_get_200_or_429_and_their_own_picture(server: Server) -> None:
    """64 clients, a queue of 16: each answer is a picture or a refusal that says when to come back."""
    statuses: Counter[int] = Counter()
    kept: dict[int, np.ndarray] = {}
    deadline = asyncio.get_running_loop().time() + 60 * SCALE

    async with client_of(server) as client:

        async def patient(number: int) -> None:
            seed = number
            while asyncio.get_running_loop().time() < deadline:
                response = await client.post(URL, json=body(seed, prompt=f"picture {seed % 7}"))
                statuses[response.status_code] += 1
                if response.status_code == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    await asyncio.sleep(random.uniform(0.05, 0.3))
                else:
                    assert response.status_code == 200, response.text
                    kept[seed] = pixels_of(response)
                    seed += 64

        await asyncio.gather(*(patient(number) for number in range(64)))
        assert statuses.keys() <= {200, 429}
        assert statuses[200] > 20
        assert statuses[429] > 0
        for seed in random.sample(sorted(kept), 12):
            alone = await client.post(URL, json=body(seed, prompt=f"picture {seed % 7}", deterministic=True))
            assert psnr_db(kept[seed], pixels_of(alone)) > 45


async def test_disconnects_at_random_moments_leave_nothing_behind(server: Server) -> None:
    async with client_of(server) as client:
        await asyncio.gather(*(client.post(URL, json=body(seed)) for seed in range(12)))
        before = Footprint(server)

        async def impatient(seed: int) -> None:
            try:
                sizes = random.choice(["64x64", "128x128", "96x160"])
                request = body(seed, size=sizes, num_inference_steps=random.randint(1, 30))
                await asyncio.wait_for(client.post(URL, json=request), random.uniform(0.0, 0.25))
            except (TimeoutError, httpx.TransportError):
                pass

        for first in range(0, int(1000 * SCALE), 20):
            await asyncio.gather(*(impatient(seed) for seed in range(first, first + 20)))
        for seed in range(int(100 * SCALE)):
            response = await client.post(URL, json=body(seed))
            assert response.status_code == 200, response.text
        ready = (await client.get("/health")).json()
        assert ready["status"] == "ready"
    after = Footprint(server)
    assert after.rss_mib < before.rss_mib + 30
    assert after.threads <= before.threads + 8


async def test_a_long_row_of_small_requests_leaves_memory_and_descriptors_flat(server: Server) -> None:
    async with client_of(server, connections=8) as client:

        async def draw(seed: int) -> None:
            response = await client.post(URL, json=body(seed, num_inference_steps=1))
            assert response.status_code == 200, response.text

        for seed in range(30):
            await draw(seed)
        before = Footprint(server)
        for seed in range(int(10_000 * SCALE * 0.3)):
            await draw(seed)
        after = Footprint(server)
    assert after.rss_mib < before.rss_mib + 50
    assert after.descriptors <= before.descriptors + 2
    assert after.threads <= before.threads + 1


async def test_a_server_whose_worker_is_killed_loses_nothing(server: Server) -> None:
    """Requests in flight when the worker dies are answered with the same pictures."""
    async with client_of(server) as client:
        alone = [pixels_of(await client.post(URL, json=body(seed, num_inference_steps=20))) for seed in range(4)]
        tasks = [asyncio.create_task(client.post(URL, json=body(seed, num_inference_steps=20))) for seed in range(4)]
        await asyncio.sleep(0.1)
        [worker] = server.workers()
        os.kill(worker, 9)
        responses = await asyncio.gather(*tasks)
        assert [response.status_code for response in responses] == [200] * 4
        for response, expected in zip(responses, alone, strict=True):
            assert psnr_db(pixels_of(response), expected) > 45
        assert server.workers() != [worker]
