"""Builds the application. Nothing happens at import: `create_app` makes a new, independent service each time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from app.dependencies import Services
from app.errors import install_handlers
from app.fetching import Fetcher
from app.jobs import Jobs
from app.links import Links
from app.metrics import Metrics
from app.middleware import (
    PROBES,
    Authentication,
    BodyLimit,
    CrossOrigin,
    ForeignForms,
    RequestContext,
    UnforeseenErrors,
)
from app.routes import chat, files, health, images, metrics, models, playground, requests
from app.settings import Settings
from app.tracing import RequestSpans, exporting_tracer, record_stages
from engine.engine import Engine, EngineState
from models.errors import CheckpointError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

CLOSING = (EngineState.DRAINING, EngineState.STOPPED)

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings, engine: Engine, fetcher: Fetcher | None = None, tracer: Tracer | None = None
) -> FastAPI:
    """The whole service. It answers at once, and turns ready when the engine has loaded.

    If the model can't be loaded, or its worker not be replaced, `app.state.failure` becomes the reason, as a sentence
    for the operator, and `app.state.stop_server` is called: whoever runs the server sets it, ends the server in it,
    and exits non-zero. `app.state.drain` is a coroutine function, there once the application has started.
    """
    app = FastAPI(title="Easel", docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False)
    if settings.otlp_endpoint and tracer is None:
        tracer = exporting_tracer(settings.otlp_endpoint)
    counted = Metrics(partial(record_stages, tracer)) if tracer else Metrics()
    services = Services(
        settings=settings,
        engine=engine,
        metrics=counted,
        links=Links(max_bytes=settings.link_store_bytes, lifetime_s=settings.link_seconds),
        fetcher=fetcher or Fetcher(settings.allow_fetch, max_bytes=settings.max_image_bytes),
        jobs=Jobs(max_jobs=settings.max_jobs, max_bytes=settings.job_store_bytes, max_age_s=settings.job_seconds),
    )
    counted.watch(engine)
    app.state.services = services
    app.state.engine = engine
    app.state.created = int(time.time())
    app.state.failure = None
    app.state.stop_server = lambda: None

    install_handlers(app)
    for routes in (images, chat, files, requests, models, health, metrics, playground):
        app.include_router(routes.router)

    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        max_total_bytes=settings.max_bodies_bytes,
        patience_s=settings.request_seconds,
    )  # the last one added is the outermost
    if settings.api_key:
        keys = [key.get_secret_value() for key in settings.api_key]
        open_paths = PROBES | {"/metrics"} if settings.metrics_open else PROBES
        app.add_middleware(Authentication, keys=keys, open_paths=open_paths, admits_link=services.links.admits)
    app.add_middleware(ForeignForms, origins=settings.cors_origin)
    app.add_middleware(UnforeseenErrors)
    if settings.cors_origin:
        app.add_middleware(CrossOrigin, origins=settings.cors_origin)
    if tracer:
        app.add_middleware(RequestSpans, tracer=tracer)
    app.add_middleware(RequestContext, is_closing=lambda: app.state.engine.state in CLOSING)
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load in the background, so that the probes answer meanwhile; at the end, let admitted work finish."""
    services: Services = app.state.services
    engine = services.engine

    def give_up(reason: str) -> None:
        app.state.failure = reason
        stop_server: Callable[[], None] = app.state.stop_server
        stop_server()

    def on_loaded(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if error := task.exception():
            reason = f"the model could not be loaded: {engine.failure or error}"
            logger.error("%s", reason, exc_info=None if isinstance(error, CheckpointError) else error)
            give_up(reason)
        else:
            logger.info("ready to draw with %s", engine.card.name)

    engine.on_failure(give_up)
    loading = asyncio.create_task(engine.start(), name="load the model")
    loading.add_done_callback(on_loaded)

    async def drain() -> None:
        loading.cancel()
        await asyncio.wait({loading})
        await engine.stop(services.settings.drain_seconds)
        await services.jobs.close()

    app.state.drain = drain
    watching = asyncio.create_task(services.metrics.watch_loop(), name="watch the event loop")
    yield
    watching.cancel()
    await drain()
