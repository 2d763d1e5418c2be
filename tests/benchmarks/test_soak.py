"""The soak, short: every kind of visit happens, and what is wrong with a service is told."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from app.png import encode_png
from benchmarks import soak
from benchmarks.footprint import Footprint
from benchmarks.visits import Unexpected, Visitors


def test_a_short_soak(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert soak.main(["--minutes", "0.4", "--phases", "6", "--model", str(checkpoint), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["problems"] == [] and report["kills"] == 2 and report["delivered"] > 20
    assert {"generation", "edit", "stream", "chat", "link", "job", "bad_request", "disconnect"} <= set(
        report["statuses"]
    )


def rest(rss_mib: float = 100, descriptors: int = 20, threads: int = 10, tasks: int = 3, pid: int = 7) -> soak.Rest:
    held = Footprint(rss_mib, descriptors, threads)
    return soak.Rest(0.0, held, held, tasks, pid)


@pytest.mark.parametrize(
    ("last", "complaints"),
    [
        (rest(), []),
        (rest(rss_mib=140), ["service: rss_growth_mib is 40", "worker: rss_growth_mib is 40"]),
        (rest(rss_mib=140, pid=8), ["service: rss_growth_mib is 40"]),
        (rest(descriptors=21, pid=8), ["service: descriptors_growth is 1"]),
        (rest(threads=19, pid=8), ["service: threads_growth is 9"]),
        (rest(tasks=4), ["service: 1 tasks more"]),
    ],
)
def test_growth_is_told(last: soak.Rest, complaints: list[str]) -> None:
    one = soak.Soak(server=None, seed=1)  # type: ignore[arg-type]
    one.report.rests = [rest(descriptors=18, pid=6), rest(), last]
    one.judge_growth()
    assert len(one.report.problems) == len(complaints)
    for problem, complaint in zip(one.report.problems, complaints, strict=True):
        assert problem.startswith(complaint)


PICTURES = {seed: np.full((8, 8, 4), seed * 20, np.uint8) for seed in range(12)}


def answer_of(seed: int) -> httpx.Response:
    encoded = base64.b64encode(encode_png(PICTURES[seed])).decode()
    return httpx.Response(200, json={"data": [{"b64_json": encoded, "seed": seed}]})


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda seed: answer_of((seed + 1) % 12), "a picture is"),
        (lambda seed: httpx.Response(500, text="oops"), "status 500"),
        (lambda seed: httpx.Response(429), "status 429"),
    ],
    ids=["another picture", "500", "no Retry-After"],
)
async def test_what_is_wrong_with_an_answer_is_told(answer: Callable[[int], httpx.Response], complaint: str) -> None:
    visitors = Visitors(random.Random(1))
    visitors.drawn = visitors.edited = PICTURES
    for wrong in (False, True):
        transport = httpx.MockTransport(
            lambda request, wrong=wrong: (answer if wrong else answer_of)(json.loads(request.content)["seed"])
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            if wrong:
                with pytest.raises(Unexpected, match=complaint):
                    await visitors.generation(http)
            else:
                assert await visitors.generation(http) == 200
    assert visitors.delivered == 1
