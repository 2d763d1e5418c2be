"""An engine that draws gradients, and clients of the application around it: in memory, and over a real socket."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from PIL import Image

from app.fetching import Fetcher
from app.launch import listen
from app.main import create_app
from app.protocol import Protocol
from app.settings import Settings
from engine.engine import EngineState, Observation
from engine.errors import NotReady, QueueFull, RequestCancelled
from engine.request import (
    Admitted,
    Finished,
    GeneratedImage,
    GenerationParams,
    GenerationResult,
    ModelCard,
    Preview,
    Progress,
    RequestEvent,
    RequestStatus,
    Timings,
    TokenUsage,
)


class GradientEngine:
    """The engine's interface with no model: a picture depends on size and seed alone, and comes at once.

    Previews come on admission. Clear `may_finish` to hold requests back; set `error` to fail them, `load_error` to fail
    the start.
    """

    def __init__(self) -> None:
        self.state = EngineState.LOADING
        self.failure: str | None = None
        self.may_load, self.may_finish = asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self.may_finish.set()
        self.error: Exception | None = None
        self.load_error: Exception | None = None
        self.is_full = False
        self.alpha = 255
        self.fixed_num_steps = False
        self.received: list[GenerationParams] = []
        self.request_ids: list[str] = []
        self.pending: dict[str, asyncio.Future[None]] = {}
        self.num_waiting = self.num_cancelled = self.num_asked = 0
        self.backlog_s = 0.0
        self.give_up: Callable[[str], None] = lambda reason: None
        self.drained_s: float | None = None

    async def start(self) -> None:
        await self.may_load.wait()
        if self.load_error:
            self.state, self.failure = EngineState.FAILED, str(self.load_error)
            raise self.load_error
        self.state = EngineState.READY

    async def stop(self, drain_s: float) -> None:
        self.state, self.drained_s = EngineState.STOPPED, drain_s

    def on_observation(self, callback: Callable[[Observation], None]) -> None:
        pass

    def on_failure(self, callback: Callable[[str], None]) -> None:
        self.give_up = callback

    @property
    def num_running(self) -> int:
        return len(self.pending)

    def status(self, request_id: str) -> RequestStatus | None:
        self.num_asked += 1
        if request_id not in self.pending:
            return None
        return RequestStatus(request_id, running=True, position=0, step=3, num_steps=50, eta_s=1.25)

    def cancel(self, request_id: str) -> bool:
        if request_id in self.pending:
            self.pending[request_id].set_exception(RequestCancelled("The request was cancelled."))
        return request_id in self.pending

    @property
    def card(self) -> ModelCard:
        if self.state == EngineState.LOADING:
            raise NotReady("The model is being loaded.", retry_after_s=2.5)
        return ModelCard(
            name="gradient",
            max_condition_images=4,
            default_resolution_px=64,
            default_num_steps=50,
            fixed_num_steps=self.fixed_num_steps,
            size_multiple_px=32,
            max_prompt_tokens=8192,
        )

    async def generate(
        self,
        params: GenerationParams | Callable[[], GenerationParams],
        *,
        request_id: str,
        prefetch: Callable[[], Awaitable[None]] | None = None,
        on_event: Callable[[RequestEvent], None] = lambda event: None,
    ) -> GenerationResult:
        if self.is_full:
            raise QueueFull("The queue is full.", retry_after_s=1.0)
        if prefetch is not None:
            await prefetch()
        if callable(params):
            params = await asyncio.to_thread(params)
        width, height = params.size_px or (64, 64)
        usage = TokenUsage(
            text_tokens=7,
            condition_image_tokens=3 * len(params.condition_images),
            output_image_tokens=16 * params.num_images,
        )
        on_event(Admitted(usage, params.num_steps or 50, ()))
        for step in range(params.num_previews):
            for index in range(params.num_images):
                on_event(Progress(index, step + 1, 50))
                on_event(Preview(index, self.draw(width, height, 100 + step)))
        self.received.append(params)
        self.request_ids.append(request_id)
        cancelled = self.pending[request_id] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(self.may_finish.wait())
        try:
            await asyncio.wait({waiting, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if cancelled.done():
                cancelled.result()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            waiting.cancel()
            self.pending.pop(request_id, None)
        if self.error:
            raise self.error
        seeds = [(params.seed + i) % 2**32 for i in range(params.num_images)]
        images = tuple(GeneratedImage(self.draw(width, height, seed), seed) for seed in seeds)
        for index, image in enumerate(images):
            on_event(Finished(index, image))
        timings = Timings(queue_s=0.5, encode_s=0.25, prefill_s=0.125, steps_s=2.0, decode_s=1.0, batch_size=1.5)
        return GenerationResult(images, usage, params.num_steps or 50, (), timings)

    def draw(self, width: int, height: int, seed: int) -> np.ndarray:
        rows, columns = np.linspace(0, 255, height), np.linspace(0, 255, width)
        pixels = np.full((height, width, 4), self.alpha, np.uint8)
        pixels[..., 0], pixels[..., 1], pixels[..., 2] = rows[:, None], columns, seed % 256
        return pixels


@pytest.fixture
async def engine() -> GradientEngine:
    return GradientEngine()


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0)  # lets the engine start
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://easel", trust_env=False) as client:
            yield client


Connect = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture
async def connect(engine: GradientEngine) -> AsyncIterator[Connect]:
    """Call it with settings for a client of a fresh application around `engine`."""
    async with AsyncExitStack() as stack:

        async def connect(*, fetcher: Fetcher | None = None, **settings: object) -> httpx.AsyncClient:
            return await stack.enter_async_context(running(create_app(Settings(**settings), engine, fetcher)))

        yield connect


@pytest.fixture
async def client(connect: Connect) -> httpx.AsyncClient:
    return await connect()


@pytest.fixture
async def serve(engine: GradientEngine) -> AsyncIterator[Callable[..., Awaitable[httpx.AsyncClient]]]:
    """Like `connect`, over a real server on a free port."""
    async with AsyncExitStack() as stack:

        async def serve(*, fetcher: Fetcher | None = None, **settings: object) -> httpx.AsyncClient:
            listener = listen("127.0.0.1", 0)
            stack.callback(listener.close)
            chosen = Settings(**settings)
            config = uvicorn.Config(
                create_app(chosen, engine, fetcher),
                http=Protocol.waiting(chosen.request_seconds, chosen.answer_seconds),
                log_config=None,
                timeout_graceful_shutdown=1,
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))

            async def stop() -> None:
                server.should_exit = True
                await serving

            stack.push_async_callback(stop)
            while not server.started:  # noqa: ASYNC110 uvicorn offers nothing to wait for
                await asyncio.sleep(0.005)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            return await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False))

        yield serve


def assert_refused(
    response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, str]:
    """The envelope, its headers and its limits; returns the error."""
    assert response.status_code == status, response.text
    assert len(response.content) <= 2048
    assert response.headers["x-request-id"]
    assert "Traceback" not in response.text
    error = response.json()["error"]
    assert response.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert isinstance(error["code"], str)
    assert error["param"] == param
    if code:
        assert error["code"] == code
    return error


@pytest.fixture
def refused() -> Callable[..., dict[str, str]]:
    return assert_refused


def open_answer(response: httpx.Response, index: int = 0) -> Image.Image:
    assert response.status_code == 200, response.text
    image = Image.open(io.BytesIO(base64.b64decode(response.json()["data"][index]["b64_json"])))
    image.load()
    return image


@pytest.fixture
def opened() -> Callable[..., Image.Image]:
    """The picture in an answer."""
    return open_answer


def encode_picture(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


@pytest.fixture
def encoded() -> Callable[..., bytes]:
    """The bytes of a picture, as a file."""
    return encode_picture


@pytest.fixture
def png() -> bytes:
    return encode_picture(Image.new("RGB", (48, 40), "teal"))
