"""What a route is given: the objects that `create_app` keeps on the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from app.metrics import Metrics
from app.settings import Settings
from engine.engine import Engine


async def settings_of(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def engine_of(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


async def metrics_of(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


SettingsDep = Annotated[Settings, Depends(settings_of)]
EngineDep = Annotated[Engine, Depends(engine_of)]
MetricsDep = Annotated[Metrics, Depends(metrics_of)]


async def count_request(request: Request, metrics: MetricsDep) -> AsyncIterator[None]:
    """Around a route: count its requests by the way they end."""
    with metrics.counting(request.scope["route"].name):
        yield


Counted = Depends(count_request, scope="function")
