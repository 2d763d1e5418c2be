"""Builds the application. Nothing happens at import: `create_app` makes a new, independent service each time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from app.errors import install_handlers
from app.middleware import Authentication, BodyLimit, RequestContext
from app.routes import health, images, models
from app.settings import Settings
from engine.engine import Engine
from models.errors import CheckpointError

logger = logging.getLogger(__name__)


def create_app(settings: Settings, engine: Engine | None = None) -> FastAPI:
    """The whole service. It answers at once, and turns ready when the engine has loaded.

    If loading fails, `app.state.startup_error` becomes the reason, as a text for the operator, and
    `app.state.stop_server` is called: whoever runs the server sets it, ends the server in it, and exits non-zero.
    """
    app = FastAPI(title="Easel", docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False)
    app.state.settings = settings
    app.state.engine = engine or Engine(settings.engine_config())
    app.state.created = int(time.time())
    app.state.startup_error = None
    app.state.stop_server = lambda: None

    install_handlers(app)
    for routes in (images, models, health):
        app.include_router(routes.router)

    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)  # the last one added is the outermost
    if settings.api_key:
        app.add_middleware(Authentication, keys=[key.get_secret_value() for key in settings.api_key])
    app.add_middleware(RequestContext)
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load in the background, so that the probes answer meanwhile; at the end, let admitted work finish."""
    engine: Engine = app.state.engine
    loading = asyncio.create_task(engine.start(), name="load the model")

    def on_loaded(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            app.state.startup_error = engine.failure or str(error) or type(error).__name__
            unforeseen = None if isinstance(error, CheckpointError) else error
            logger.error("the model could not be loaded: %s", app.state.startup_error, exc_info=unforeseen)
            stop_server: Callable[[], None] = app.state.stop_server
            stop_server()

    loading.add_done_callback(on_loaded)
    yield
    loading.cancel()
    await asyncio.wait({loading})
    await engine.stop(app.state.settings.drain_seconds)
