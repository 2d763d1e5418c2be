"""The figures at `/metrics`. Every application counts for itself: nothing is registered globally.

Labels come from small fixed sets, a route's name and one of `Outcome`: no prompt, id or path is ever one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect

from app.errors import ApiError
from engine.engine import Engine, Observation, WorkerRestarted
from engine.errors import DeadlineExceeded, EngineStopped, InvalidRequest, NotReady, QueueFull, RequestCancelled
from engine.messages import DeviceMemory, OutOfMemoryRetried, WorkDone
from engine.request import GenerationResult, Timings
from engine.work import DecodeImage, DecodePreview, DenoiseStep, EncodePrompt, Prefill

ITEM_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LAG_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)
LAG_INTERVAL_SECONDS = 0.05
REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
TOKENS = tuple(2**power for power in range(6, 17))


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    INVALID = "invalid"
    QUEUE_FULL = "queue_full"
    NOT_READY = "not_ready"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    DISCONNECTED = "disconnected"
    FAILED = "failed"


class Counting:
    """Around the answer to one request: counts it by the way it ends, and times it if it gets its pictures.

    An answer that is still being made when its route returns is `postponed`: the route's own `with` then counts
    nothing, unless it ends in an error, and whoever makes the answer enters it again.
    """

    def __init__(self, requests: Counter, latency: Histogram, endpoint: str) -> None:
        self._requests, self._latency, self._endpoint = requests, latency, endpoint
        self._started_s = time.perf_counter()
        self._postponed = False

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s

    def postpone(self) -> None:
        self._postponed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._requests.labels(self._endpoint, outcome_of(error)).inc()
        elif self._postponed:
            self._postponed = False
        else:
            self._requests.labels(self._endpoint, Outcome.OK).inc()
            self._latency.observe(self.elapsed_s)


class Metrics:
    """Counts what the engine tells (`observe`) and how requests end (`counting`)."""

    def __init__(self, on_delivered: Callable[[Timings, float], None] = lambda timings, file_s: None) -> None:
        self._on_delivered = on_delivered
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "easel_requests", "Requests for pictures by outcome.", ("endpoint", "outcome"), registry=self._registry
        )
        self._decode_graphs = Counter(
            "easel_decode_graph", "Denoise steps by how their graph ran.", ("result",), registry=self._registry
        )
        self._prompt_cache = Counter(
            "easel_prompt_cache", "Encodes by whether the prompt was known.", ("result",), registry=self._registry
        )
        self._images = self._counter("images", "Pictures delivered.")
        self._restarts = self._counter("worker_restarts", "Workers that died and were replaced.")
        self._oom_retries = self._counter("oom_retries", "Items of work tried again after running out of memory.")
        self._latency = self._histogram("request_latency_seconds", "From the call to its pictures.", REQUEST_SECONDS)
        self._queue_wait = self._histogram(
            "queue_wait_seconds", "Time in which nothing of a request ran.", REQUEST_SECONDS
        )
        self._first_partial = self._histogram(
            "time_to_first_partial_seconds", "From the call to the first partial picture.", REQUEST_SECONDS
        )
        self._encode = self._histogram("encode_seconds", "Encoding of a prompt and its images.", ITEM_SECONDS)
        self._prefill = self._histogram("prefill_seconds", "Prefill of a request's prefix.", ITEM_SECONDS)
        self._step = self._histogram("denoise_step_seconds", "One denoise step of a batch.", ITEM_SECONDS)
        self._decode = self._histogram("vae_decode_seconds", "VAE decode of a picture.", ITEM_SECONDS)
        self._file_encode = self._histogram("file_encode_seconds", "Writing of an answer's files.", ITEM_SECONDS)
        self._rows = self._histogram("batch_rows", "Rows in a denoise step.", ROWS)
        self._tokens = self._histogram("batch_tokens", "Target tokens in a denoise step.", TOKENS)
        self._lag = self._histogram("event_loop_lag_seconds", "How late the event loop wakes what is due.", LAG_SECONDS)

        self._gpu_memory = Gauge(
            "easel_gpu_memory_bytes", "What the worker holds of the GPU.", ("kind",), registry=self._registry
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"easel_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"easel_{name}", text, buckets=buckets, registry=self._registry)

    def watch(self, engine: Engine) -> None:
        """Count what `engine` tells, and show what it is doing at the moment of each reading."""
        engine.on_observation(self.observe)
        gauges = {
            "requests_running": ("Admitted requests of which something has run.", lambda: engine.num_running),
            "requests_waiting": ("Admitted requests of which nothing has run.", lambda: engine.num_waiting),
            "backlog_seconds": ("Predicted time until all admitted requests are done.", lambda: engine.backlog_s),
            "tasks": ("Tasks of the service's event loop; many that stay are a leak.", num_tasks),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"easel_{name}", text, registry=self._registry).set_function(read)

    async def watch_loop(self) -> None:
        """Measure for ever how long what is due has to wait for the event loop, and so every client."""
        while True:
            due_s = time.perf_counter() + LAG_INTERVAL_SECONDS
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self._lag.observe(max(0.0, time.perf_counter() - due_s))

    def observe(self, observation: Observation) -> None:
        """Count what the engine tells."""
        match observation:
            case WorkDone(EncodePrompt(), seconds, shortcut=result):
                self._prompt_cache.labels(result).inc()
                self._encode.observe(seconds)
            case WorkDone(Prefill(), seconds):
                self._prefill.observe(seconds)
            case WorkDone(DenoiseStep(), seconds, rows, tokens, result):
                self._decode_graphs.labels(result).inc()
                self._step.observe(seconds)
                self._rows.observe(rows)
                self._tokens.observe(tokens)
            case WorkDone(DecodeImage() | DecodePreview(), seconds):
                self._decode.observe(seconds)
            case DeviceMemory(allocated, reserved, total):
                for kind, size in (("allocated", allocated), ("reserved", reserved), ("total", total)):
                    self._gpu_memory.labels(kind).set(size)
            case OutOfMemoryRetried():
                self._oom_retries.inc()
            case WorkerRestarted():
                self._restarts.inc()

    def counting(self, endpoint: str) -> Counting:
        """For the request that is answered inside it."""
        return Counting(self._requests, self._latency, endpoint)

    def first_partial(self, seconds: float) -> None:
        """Note how long a client waited for the first partial picture of its request."""
        self._first_partial.observe(seconds)

    def delivered(self, result: GenerationResult, file_s: float) -> None:
        """Count the pictures of an answer that is ready to be sent."""
        self._images.inc(len(result.images))
        self._queue_wait.observe(result.timings.queue_s)
        self._file_encode.observe(file_s)
        self._on_delivered(result.timings, file_s)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


def num_tasks() -> int:
    """Of the running event loop; 0 outside of one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def outcome_of(error: BaseException) -> Outcome:
    match error:
        case QueueFull():
            return Outcome.QUEUE_FULL
        case NotReady() | EngineStopped():
            return Outcome.NOT_READY
        case DeadlineExceeded():
            return Outcome.DEADLINE
        case RequestCancelled():
            return Outcome.CANCELLED
        case ClientDisconnect() | asyncio.CancelledError():
            return Outcome.DISCONNECTED
        case InvalidRequest():
            return Outcome.INVALID
        case ApiError(status=status) if status < 500:
            return Outcome.INVALID
        case _:
            return Outcome.FAILED
