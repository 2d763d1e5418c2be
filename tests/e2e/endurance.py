"""What the endurance tests share: how much they do, what a server holds, and where their figures go.

`ENDURANCE_SCALE=1` does the full counts; `ENDURANCE_JSON` names a file for what was measured.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.footprint import Footprint
from tests.server import Server

SCALE = float(os.environ.get("ENDURANCE_SCALE", "0.03"))
URL = "/v1/images/generations"
SMALL = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 2}
RESTART_TIMEOUT_S = 90
SAME_PICTURE_DB = 45  # other neighbours in a batch round differently; another picture has some 10


def scaled(count: int, least: int = 1) -> int:
    return max(least, int(count * SCALE))


def client_of(server: Server, connections: int = 100) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


def body(seed: int, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "seed": seed, **changes}


def pixels_of(response: httpx.Response) -> np.ndarray:
    encoded = response.json()["data"][0]["b64_json"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA"))


async def drawn_alone(client: httpx.AsyncClient, seed: int, **changes: Any) -> np.ndarray:
    response = await client.post(URL, json=body(seed, deterministic=True, **changes))
    assert response.status_code == 200, response.text
    return pixels_of(response)


async def counters(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Every counter of /metrics by its name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families((await client.get("/metrics")).text)
        if family.type == "counter"
        for sample in family.samples
    }


def footprint_of(server: Server) -> Footprint:
    """Memory, descriptors and threads of a server and its worker."""
    return Footprint.of(server.process.pid, *server.workers())


async def at_rest(server: Server) -> Footprint:
    """What is held once the connections of clients that have left are closed."""
    seen, now = footprint_of(server), None
    while now is None or now.descriptors != seen.descriptors:
        await asyncio.sleep(0.5)
        seen, now = now or seen, footprint_of(server)
    return now


async def until_ready(client: httpx.AsyncClient, status: int = 200) -> None:
    """Until the probe answers with `status`; 503 is until it is not ready."""
    async with asyncio.timeout(RESTART_TIMEOUT_S):
        while (await client.get("/health/ready")).status_code != status:  # noqa: ASYNC110 it is only seen from outside
            await asyncio.sleep(0.01)


def record(name: str, **figures: object) -> None:
    """Add what a test measured to the file that was asked for."""
    print(f"{name}: {figures}")
    if target := os.environ.get("ENDURANCE_JSON"):
        file = Path(target)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, name: figures}, indent=1) + "\n")
