"""Requests that don't just wait for their picture, and the service's own end, on a server that really runs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server import Server, assert_gone, serving
from tests.tiny_checkpoint import TinySpec, build_checkpoint

GENERATIONS = "/v1/images/generations"
REQUESTS = "/v1/images/requests"
SHORT = {"size": "64x64", "num_inference_steps": 1}
LONG = {"size": "256x256", "num_inference_steps": 200, "n": 10, "priority": 10}  # 2,000 steps
PATIENCE_S = 60  # a busy machine is slow; nothing waits this long on an idle one


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the others, with a small default size: a server that loads it is ready soon."""
    return build_checkpoint(tmp_path_factory.mktemp("tiny"), TinySpec(resolution=64))


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny, tmp_path_factory.mktemp("server"), "--max-queue", "2", "--max-stretch", "1000") as running:
        yield running


class Call:
    """A request for pictures that was sent; its answer can be awaited or left behind."""

    def __init__(self, url: str, request_id: str, fields: dict[str, object]) -> None:
        self.connection = HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
        headers = {"content-type": "application/json", "x-request-id": request_id}
        self.connection.request("POST", GENERATIONS, json.dumps({"prompt": "a", **fields}), headers)

    def answer(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and body."""
        response = self.connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, json.load(response)

    def leave(self) -> None:
        self.connection.close()


Post = Callable[..., Call]


@pytest.fixture
def calls() -> Iterator[list[Call]]:
    made: list[Call] = []
    yield made
    for call in made:
        call.leave()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def post(server: Server, client: httpx.Client, calls: list[Call]) -> Iterator[Post]:
    """Sends a request to the shared server; at the end none of the test's requests is left there."""

    def post(request_id: str, **fields: object) -> Call:
        calls.append(Call(server.url, request_id, fields))
        return calls[-1]

    yield post
    for call in calls:
        call.leave()
    until(lambda: num_admitted(client) == 0)


def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def num_admitted(client: httpx.Client) -> int:
    state = client.get("/health/ready").json()
    return int(state["running"] + state["waiting"])


def state_of(client: httpx.Client, request_id: str) -> dict[str, Any]:
    response = client.get(f"{REQUESTS}/{request_id}")
    assert response.status_code in (200, 404)
    state: dict[str, Any] = response.json()
    return state


def until_running(client: httpx.Client, request_id: str) -> None:
    until(lambda: state_of(client, request_id).get("step", 0) >= 1)


def test_the_service_itself_never_loads_torch(server: Server, client: httpx.Client) -> None:
    picture = client.post(GENERATIONS, json={"prompt": "a", "n": 2, **SHORT}).json()["data"][0]["b64_json"]
    fields = {"prompt": "a", "images": [{"image_url": f"data:image/png;base64,{picture}"}], "stream": True, **SHORT}
    assert "completed" in client.post("/v1/images/edits", json={**fields, "partial_images": 1}).text
    loaded = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, *server.workers())]
    assert ["libtorch" in maps for maps in loaded] == [False, True]


def figures(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics by its name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def test_cancel_while_it_runs(client: httpx.Client, post: Post) -> None:
    call = post("mine", **LONG)
    until_running(client, "mine")
    assert client.delete(f"{REQUESTS}/mine").json() == {"id": "mine", "object": "image.request", "deleted": True}
    status, headers, body = call.answer()
    assert (status, body["error"]["code"]) == (499, "request_cancelled")
    assert (headers["x-request-id"], headers["x-should-retry"]) == ("mine", "false")
    assert client.get(f"{REQUESTS}/mine").status_code == 404
    assert post("next", **SHORT).answer()[0] == 200


def test_state_of_the_running_and_the_queued(client: httpx.Client, post: Post) -> None:
    post("first", **LONG)
    until_running(client, "first")
    second = post("second", **{**LONG, "size": "256x224", "priority": 0})
    until(lambda: "status" in state_of(client, "second"))
    running, queued = state_of(client, "first"), state_of(client, "second")
    assert (running["status"], running["position"], running["num_steps"]) == ("running", 0, 2000)
    assert (queued["status"], queued["position"], queued["step"]) == ("queued", 1, 0)
    assert 0 < running["eta_seconds"] < queued["eta_seconds"]
    before = figures(client)["easel_encode_seconds_count",]
    assert client.delete(f"{REQUESTS}/second").status_code == 200
    assert second.answer()[0] == 499
    assert state_of(client, "first")["step"] >= running["step"]
    assert figures(client)["easel_encode_seconds_count",] == before  # it never started


def test_full_queue_and_places_freed_by_leaving(client: httpx.Client, post: Post) -> None:
    running, queued = post("running", **LONG), post("queued", **{**LONG, "size": "256x224", "priority": 0})
    until_running(client, "running")
    until(lambda: num_admitted(client) == 2)
    status, headers, body = post("third", **SHORT).answer()
    assert (status, body["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) >= 1
    before = figures(client)["easel_encode_seconds_count",]
    queued.leave()
    until(lambda: num_admitted(client) == 1)
    assert post("fourth", **SHORT, priority=10).answer()[0] == 200
    assert figures(client)["easel_encode_seconds_count",] == before + 1  # the queued one never started
    running.leave()
    until(lambda: num_admitted(client) == 0)
    assert post("fifth", **SHORT).answer()[0] == 200


def test_nothing_more_is_drawn_for_a_client_that_has_left(client: httpx.Client, post: Post) -> None:
    call = post("leaving", **LONG)
    until_running(client, "leaving")
    call.leave()
    until(lambda: num_admitted(client) == 0)
    steps = figures(client)["easel_denoise_step_seconds_count",]
    time.sleep(0.5)  # enough for many steps
    assert figures(client)["easel_denoise_step_seconds_count",] <= steps + 1


def test_work_that_cannot_be_done_in_time_is_refused_at_once(client: httpx.Client, post: Post) -> None:
    steps = figures(client)["easel_denoise_step_seconds_count",]
    status, headers, body = post("hasty", **LONG, timeout_s=0.2).answer()
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert figures(client)["easel_denoise_step_seconds_count",] == steps


def test_time_runs_out_in_the_queue(client: httpx.Client, post: Post) -> None:
    post("long", **LONG)
    until_running(client, "long")
    started_s = time.monotonic()
    status, _, body = post("late", **SHORT, priority=-10, timeout_s=4).answer()
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert 1 < time.monotonic() - started_s < 5  # as soon as its own work no longer fits what is left
    assert num_admitted(client) == 1


def test_the_sdk_gets_an_answer_before_its_read_timeout(server: Server, client: httpx.Client, post: Post) -> None:
    post("long", **LONG)
    until_running(client, "long")
    before = figures(client).get(("easel_requests_total", "create_image", "deadline"), 0)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=5, max_retries=2) as sdk,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        sdk.images.generate(prompt="a", size="64x64", extra_body={"num_inference_steps": 1, "priority": -10})  # type: ignore[call-overload]
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert figures(client)["easel_requests_total", "create_image", "deadline"] == before + 1  # it did not try again


def test_the_figures(server: Server, client: httpx.Client, post: Post) -> None:
    before = figures(client)
    status, _, body = post("canary", **SHORT).answer()
    assert status == 200 and body["metrics"].keys() >= {"queue_seconds", "steps_seconds", "file_seconds", "batch_size"}
    client.get(f"{REQUESTS}/%1b%5b31mcanary")
    after = figures(client)
    grown = {key[0] for key in after if after[key] > before.get(key, 0)}
    assert grown >= {
        *("easel_requests_total", "easel_images_total", "easel_request_latency_seconds_count"),
        *(f"easel_{name}_seconds_count" for name in ("queue_wait", "encode", "prefill", "denoise_step", "vae_decode")),
        *("easel_file_encode_seconds_count", "easel_batch_rows_sum", "easel_batch_tokens_sum"),
    }
    assert after["easel_worker_restarts_total",] == after["easel_oom_retries_total",] == 0
    assert after["easel_requests_running",] + after["easel_requests_waiting",] + after["easel_backlog_seconds",] == 0
    labelled = {key[1:] for key in after if key[0] == "easel_requests_total"}
    assert labelled <= {
        (endpoint, outcome)
        for endpoint in ("create_image", "edit_image")
        for outcome in ("ok", "queue_full", "deadline", "cancelled", "disconnected")
    }
    assert "canary" not in str(after)
    assert "\x1b" not in server.log


def test_ctrl_c_drains(tiny: Path, tmp_path: Path, calls: list[Call]) -> None:
    """Pressed in a terminal it reaches the worker too. New clients get an answer all the while."""
    with (
        serving(tiny, tmp_path, "--drain-seconds", str(PATIENCE_S)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        children = server.children()
        fields = {"size": "256x256", "num_inference_steps": 60}
        calls += [Call(server.url, name, fields) for name in ("a", "b", "c")]
        until(lambda: num_admitted(client) == 3)
        os.killpg(server.process.pid, signal.SIGINT)
        until(lambda: client.get("/health/ready").status_code == 503)
        assert client.get("/health/ready").json()["status"] == "draining"
        refused = client.post(GENERATIONS, json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert [call.answer()[0] for call in calls] == [200] * 3
        assert server.process.wait(PATIENCE_S) == 0
        assert_gone(children)
    assert "Traceback" not in server.log


def test_second_signal_ends_at_once(tiny: Path, tmp_path: Path, calls: list[Call]) -> None:
    with serving(tiny, tmp_path) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        children = server.children()
        calls.append(Call(server.url, "long", LONG))
        until_running(client, "long")
        server.process.terminate()
        until(lambda: client.get("/health/ready").status_code == 503)
        started_s = time.monotonic()
        assert server.stop() == 128 + signal.SIGTERM
        assert time.monotonic() - started_s < 2
        assert_gone(children)


def test_sigterm_while_loading(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path, ready=False) as server:
        until(server.workers)
        children = server.children()
        started_s = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started_s < 5
        assert_gone(children)
    assert "Traceback" not in server.log


def test_killed_server_leaves_no_worker(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path) as server:
        children = server.children()
        assert children
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        assert_gone(children)
