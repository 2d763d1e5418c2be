"""The load generator against a server that is made up: what it sends, and what it finds wrong."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks import driving, load, sweep
from benchmarks.client import FAILED, Client
from benchmarks.outcomes import NO_WAITS, Waits, judge_waits
from benchmarks.pictures import psnr_db
from benchmarks.traffic import Kind, Mix

MIX = Mix("live", ((64, 1),))


def picture(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class Service:
    """Answers at once; `faults` maps a seed to what goes wrong with it."""

    def __init__(self, **faults: str) -> None:
        self.faults = faults
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.path.endswith("edits"):
            return self.answer(0)
        seed = json.loads(request.content)["seed"]
        match self.faults.get(f"seed_{seed}"):
            case "full":
                return httpx.Response(429, headers={"retry-after": "1"})
            case "silent":
                return httpx.Response(429)
            case "broken":
                return httpx.Response(500, text="oops")
            case "gone":
                raise httpx.ReadError("connection lost")
            case "crossed":
                return self.answer(seed + 1)
            case "other picture":
                return self.answer(seed, picture(len(self.requests)))
        return self.answer(seed)

    def answer(self, seed: int, b64_json: str | None = None) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"b64_json": b64_json or picture(seed), "seed": seed}]})


async def drive(service: Service, *, verify: int = 0) -> driving.Report:
    async with httpx.AsyncClient(transport=httpx.MockTransport(service), base_url="http://test") as http:
        client = Client(http, num_steps=2)
        isolated_s = await driving.calibrate(client, MIX)
        asked = await driving.open_loop(
            client, MIX, rate_per_s=200.0, duration_s=0.2, max_requests=20, seed=1, keep=verify
        )
        report = driving.report_on(asked, isolated_s, capacity_per_s=10.0)
        if verify:
            report.worst_psnr_db = min(await driving.verify(client, asked, verify))
        return report


async def test_a_good_run_has_no_problems() -> None:
    report = await drive(Service(seed_1000003="full"), verify=3)
    assert report.problems == []
    assert report.statuses == {200: 19, 429: 1}
    assert report.worst_psnr_db == float("inf")
    assert report.summary.count == 20 and report.summary.refused == 1


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("silent", "1 of 1 answers 429 lack Retry-After"),
        ("broken", "1 requests ended with 500: oops"),
        ("gone", "1 requests ended with no answer"),
        ("crossed", "1 pictures are another request's"),
    ],
)
async def test_what_is_wrong_is_told(fault: str, complaint: str) -> None:
    (problem,) = (await drive(Service(seed_1000005=fault))).problems
    assert problem.startswith(complaint)


async def test_a_picture_that_changed_shows() -> None:
    report = await drive(Service(seed_1000000="other picture"), verify=1)
    assert report.worst_psnr_db is not None and report.worst_psnr_db < load.MIN_PSNR_DB


async def test_clients_wait_for_their_answer_and_heed_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    transport = httpx.MockTransport(Service(seed_1000002="full"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        asked = await driving.closed_loop(Client(http, 2), MIX, 3, duration_s=60, max_requests=9, seed=1, keep=0)
    assert sorted(entry.seed for entry in asked) == [1_000_000 + index for index in range(9)]
    assert slept == [pytest.approx(1.0)]


async def test_kinds_become_fields_and_files() -> None:
    service = Service()
    async with httpx.AsyncClient(transport=httpx.MockTransport(service), base_url="http://test") as http:
        client = Client(http, num_steps=3)
        await client.ask(Kind(96, guided=True), 5)
        edited = await client.ask(Kind(96, num_condition_images=1), 6)
    fields = json.loads(service.requests[0].content)
    assert (fields["size"], fields["num_inference_steps"], fields["true_cfg_scale"]) == ("96x96", 3, 4.0)
    assert service.requests[1].url.path == "/v1/images/edits" and b"\x89PNG" in service.requests[1].content
    assert edited.status == 200 != FAILED


def test_sizes_have_weights() -> None:
    assert load.parse_sizes("64:60,128") == ((64, 60.0), (128, 1.0))


def test_psnr() -> None:
    black, grey = np.zeros((4, 4, 4), np.uint8), np.full((4, 4, 4), 16, np.uint8)
    assert psnr_db(black, black) == float("inf")
    assert psnr_db(black, grey) == pytest.approx(24.05, abs=0.01)
    assert psnr_db(black, grey[:2]) == 0.0


@pytest.mark.parametrize(
    ("refusals", "ended_s", "expected"),
    [
        ([(1.0, 0.5)], [1.4], Waits(1, 1.0, 0.5, 0.4)),
        ([(1.0, 0.5)], [1.7], Waits(1, 0.0, 0.5, 0.7)),
        ([(1.0, 0.5), (2.0, 0.5)], [0.9, 1.1, 3.0], Waits(2, 0.5, 0.5, 0.55)),
        ([(1.0, 0.5), (2.0, 0.1)], [1.2], Waits(1, 1.0, 0.5, 0.2)),  # of the last one nobody knows
        ([], [1.0], NO_WAITS),
    ],
)
def test_waits_are_judged(refusals: list[tuple[float, float]], ended_s: list[float], expected: Waits) -> None:
    found = judge_waits(refusals, ended_s, slack_s=0.05)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


class Overloaded(Service):
    """At the second load it takes one request in four."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        seed = json.loads(request.content)["seed"]
        turn = seed // 1_000_000 - 2  # after the calibration and the capacity
        if turn % 2 == 1 and seed % 4:
            return httpx.Response(429, headers={"retry-after-ms": "1", "retry-after": "1"})
        return super().__call__(request)


async def test_a_collapse_is_told() -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(Overloaded()), base_url="http://test") as http:
        client = Client(http, num_steps=2)
        isolated_s = dict.fromkeys(MIX.kinds(), 0.01)
        found = await sweep.sweep(client, MIX, (0.2, 0.4), isolated_s, duration_s=0.6, max_requests=200, seed=1)
    assert any(problem.startswith("goodput at load 0.4 is ") for problem in found.problems)
