"""The figures at /metrics: they follow what happens, and their labels stay few whatever clients send."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect

from app.errors import invalid
from app.metrics import Metrics
from engine.batching import BatchKey
from engine.engine import WorkerRestarted
from engine.errors import (
    DeadlineExceeded,
    EngineStopped,
    GenerationFailed,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestCancelled,
)
from engine.messages import DeviceMemory, OutOfMemoryRetried, WorkDone
from engine.work import DecodeImage, DecodePreview, DenoiseStep, DropPrefix, EncodePrompt, Prefill, Sample
from models.layout import Grid

URL = "/v1/images/generations"
SHOWN = {  # every family that dashboards and alerts may rely on: its type and its labels
    "easel_requests": ("counter", {"endpoint", "outcome"}),
    "easel_requests_running": ("gauge", set()),
    "easel_requests_waiting": ("gauge", set()),
    "easel_request_latency_seconds": ("histogram", set()),
    "easel_queue_wait_seconds": ("histogram", set()),
    "easel_time_to_first_partial_seconds": ("histogram", set()),
    "easel_encode_seconds": ("histogram", set()),
    "easel_prefill_seconds": ("histogram", set()),
    "easel_denoise_step_seconds": ("histogram", set()),
    "easel_vae_decode_seconds": ("histogram", set()),
    "easel_file_encode_seconds": ("histogram", set()),
    "easel_batch_rows": ("histogram", set()),
    "easel_batch_tokens": ("histogram", set()),
    "easel_backlog_seconds": ("gauge", set()),
    "easel_event_loop_lag_seconds": ("histogram", set()),
    "easel_tasks": ("gauge", set()),
    "easel_images": ("counter", set()),
    "easel_decode_graph": ("counter", {"result"}),
    "easel_worker_restarts": ("counter", set()),
    "easel_oom_retries": ("counter", set()),
    "easel_gpu_memory_bytes": ("gauge", {"kind"}),
    "easel_prompt_cache": ("counter", {"result"}),
}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and label values, without bucket bounds and creation times."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


async def read(client, **options) -> dict[tuple[str, ...], float]:
    response = await client.get("/metrics", **options)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return samples(response.text)


async def test_answers_are_counted(client, engine):
    await client.post(URL, json={"prompt": "a", "n": 2})
    await client.post(URL, json={"prompt": "a", "n": 11})
    await client.post(URL, content=b"{", headers={"content-type": "text/plain"})
    await client.post("/v1/images/edits", data={"prompt": "a"})
    figures = await read(client)
    assert figures["easel_requests_total", "create_image", "ok"] == 1
    assert figures["easel_requests_total", "create_image", "invalid"] == 2
    assert figures["easel_requests_total", "edit_image", "invalid"] == 1
    assert figures["easel_images_total",] == 2
    assert figures["easel_request_latency_seconds_count",] == 1
    assert figures["easel_queue_wait_seconds_sum",] == 0.5
    assert figures["easel_file_encode_seconds_sum",] > 0


async def test_the_moment_is_shown(client, engine):
    engine.num_waiting, engine.backlog_s = 3, 12.5
    figures = await read(client)
    assert figures["easel_requests_running",] == 0
    assert figures["easel_requests_waiting",] == 3
    assert figures["easel_backlog_seconds",] == 12.5
    assert figures["easel_tasks",] == len(asyncio.all_tasks())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("too long", param="prompt"), "invalid"),
        (invalid("bad"), "invalid"),
        (QueueFull("full", retry_after_s=1), "queue_full"),
        (NotReady("loading", retry_after_s=1), "not_ready"),
        (EngineStopped("stopped"), "not_ready"),
        (DeadlineExceeded("late"), "deadline"),
        (RequestCancelled("cancelled"), "cancelled"),
        (ClientDisconnect(), "disconnected"),
        (asyncio.CancelledError(), "disconnected"),
        (GenerationFailed("not finite"), "failed"),
        (RuntimeError("a bug"), "failed"),
    ],
)
async def test_outcomes(client, engine, error, outcome):
    metrics = Metrics()
    with pytest.raises(type(error)), metrics.counting("create_image"):
        raise error
    figures = samples(metrics.text().decode())
    assert {key: value for key, value in figures.items() if key[0] == "easel_requests_total"} == {
        ("easel_requests_total", "create_image", outcome): 1
    }
    assert figures["easel_request_latency_seconds_count",] == 0


async def test_every_promised_name_is_shown_with_its_type_and_labels(client, engine):
    metrics = client._transport.app.state.services.metrics
    step = DenoiseStep(BatchKey(Grid(4, 4), ()), (Sample("a", 0, 0),))
    metrics.observe(WorkDone(EncodePrompt("a"), 1.0, shortcut="miss"))
    metrics.observe(WorkDone(step, 1.0, rows=1, tokens=16, shortcut="eager"))
    metrics.observe(DeviceMemory(1, 2, 3))
    await client.post(URL, json={"prompt": "a"})
    families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    shown = {}
    for family in families:
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        if not family.name.endswith("_created"):
            shown[family.name] = (family.type, labels)
    assert shown.items() >= SHOWN.items()


def test_work_is_counted():
    step = DenoiseStep(BatchKey(Grid(4, 4), ()), (Sample("a", 0, 0), Sample("b", 0, 7)))
    metrics = Metrics()
    for observation in (
        WorkDone(EncodePrompt("a"), 1.0),
        WorkDone(Prefill("a"), 2.0),
        WorkDone(step, 3.0, rows=2, tokens=32),
        WorkDone(DecodeImage("a", 0), 3.0),
        WorkDone(DecodePreview("a", 0, 1), 1.0),
        WorkDone(DropPrefix("a"), 9.0),
        OutOfMemoryRetried(),
        WorkerRestarted(),
        WorkerRestarted(),
    ):
        metrics.observe(observation)
    figures = samples(metrics.text().decode())
    names = ("encode", "prefill", "denoise_step", "vae_decode")
    assert [figures[f"easel_{name}_seconds_sum",] for name in names] == [1, 2, 3, 4]
    assert (figures["easel_batch_rows_sum",], figures["easel_batch_tokens_sum",]) == (2, 32)
    assert (figures["easel_oom_retries_total",], figures["easel_worker_restarts_total",]) == (1, 2)


async def test_labels_stay_few_and_carry_nothing_of_a_client(client, engine):
    await client.post(URL, json={"prompt": "a"})
    await client.post(URL, json={"prompt": "a", "n": 0})
    before = await read(client)
    for number in range(30):
        headers = {"x-request-id": f"canary-{number}"}
        await client.post(URL, json={"prompt": f"canary {number}", f"canary{number}": 1}, headers=headers)
        await client.post(URL, json={"prompt": f"canary {number}", "user": "canary"}, headers=headers)
        await client.post(URL, json={"prompt": "a", "model": f"canary-{number}"})
        await client.request(f"CANARY{number}", URL)
        for path in (f"/canary/{number}", f"/v1/images/requests/canary-{number}", f"/v1/models/canary{number}"):
            await client.get(path)
    text = (await client.get("/metrics")).text
    assert samples(text).keys() == before.keys()
    assert "canary" not in text


async def test_a_blocked_event_loop_shows(client, engine):
    before = (await read(client))["easel_event_loop_lag_seconds_sum",]
    time.sleep(0.4)  # noqa: ASYNC251 nothing else runs meanwhile
    await asyncio.sleep(0.01)
    assert (await read(client))["easel_event_loop_lag_seconds_sum",] - before > 0.3


async def test_each_application_counts_for_itself(connect):
    first, second = await connect(), await connect()
    await first.post(URL, json={"prompt": "a"})
    assert (await read(first))["easel_images_total",] == 1
    assert (await read(second))["easel_images_total",] == 0


async def test_a_key_is_needed_unless_a_setting_says_otherwise(connect, refused):
    client = await connect(api_key=("one",))
    refused(await client.get("/metrics"), 401)
    await read(client, headers={"authorization": "Bearer one"})
    client = await connect(api_key=("one",), metrics_open=True)
    await read(client)
    refused(await client.get("/v1/models"), 401)


async def test_gpu_memory_is_shown_once_a_worker_tells_it():
    metrics = Metrics()
    assert "easel_gpu_memory_bytes{" not in metrics.text().decode()
    metrics.observe(DeviceMemory(allocated_bytes=2, reserved_bytes=3, total_bytes=9))
    figures = samples(metrics.text().decode())
    assert [figures["easel_gpu_memory_bytes", kind] for kind in ("allocated", "reserved", "total")] == [2, 3, 9]
