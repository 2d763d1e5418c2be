"""What a route is given: the objects that `create_app` keeps on the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from app.fetching import Fetcher
from app.jobs import Jobs
from app.links import Links
from app.metrics import Counting, Metrics
from app.settings import Settings
from engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that an answer may need."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    links: Links
    jobs: Jobs
    fetcher: Fetcher

    @property
    def keeps_unknown(self) -> bool:
        """Whether fields that nobody knows are only warned of."""
        return self.settings.unknown_fields == "warn"


async def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def settings_of(request: Request) -> Settings:
    return (await services_of(request)).settings


async def engine_of(request: Request) -> Engine:
    return (await services_of(request)).engine


async def metrics_of(request: Request) -> Metrics:
    return (await services_of(request)).metrics


ServicesDep = Annotated[Services, Depends(services_of)]
SettingsDep = Annotated[Settings, Depends(settings_of)]
EngineDep = Annotated[Engine, Depends(engine_of)]
MetricsDep = Annotated[Metrics, Depends(metrics_of)]


async def count_request(request: Request, metrics: MetricsDep) -> AsyncIterator[Counting]:
    """Around a route: count its requests by the way they end."""
    with metrics.counting(request.scope["route"].name) as counting:
        yield counting


Counted = Depends(count_request, scope="function")
CountingDep = Annotated[Counting, Counted]
