"""Requests made up from the service's own OpenAPI document: whatever comes, the answer is none of the 500s.

`FUZZ_EXAMPLES=2000 python -m pytest tests/e2e/test_fuzzing.py` goes further than every run of the tests does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from tests.server import Server, serving

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "15"))  # of every operation and mode
# Small enough that what turns out to be valid is drawn at once.
FLAGS = (
    "--max-side", "64", "--max-output-pixels", "4096", "--max-pixel-steps", "40000", "--default-num-steps", "1",
    "--default-resolution", "64", "--request-seconds", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoint, tmp_path_factory.mktemp("server"), *FLAGS) as running:
        yield running


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_no_request_of_any_shape_is_our_fault(server: Server, mode: schemathesis.GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    asked: set[str] = set()
    statuses: set[int] = set()
    for result in document.get_all_operations():
        operation = result.ok()

        @seed(7)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def attack(case: schemathesis.Case) -> None:
            answer = case.call(base_url=server.url, timeout=60)
            asked.add(f"{case.method} {case.path}")
            statuses.add(answer.status_code)
            too_soon = answer.status_code == 504 and "timeout_s" in str(case.body)  # what was asked for in no time
            assert answer.status_code < 500 or too_soon, (case.as_curl_command(), answer.text[:300])

        with contextlib.suppress(Unsatisfiable):  # there is nothing to get wrong in some
            attack()
    assert {"POST /v1/images/generations", "POST /v1/images/edits", "POST /v1/chat/completions"} <= asked
    assert {200, 400} <= statuses if mode is schemathesis.GenerationMode.POSITIVE else 400 in statuses
    order = {"prompt": "a", "size": "64x64"}
    assert httpx.post(f"{server.url}/v1/images/generations", json=order, timeout=60).status_code == 200
    assert "Traceback" not in server.log
