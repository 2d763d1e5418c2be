"""What a route is given: the two objects that `create_app` keeps on the application."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from app.settings import Settings
from engine.engine import Engine


async def settings_of(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def engine_of(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


SettingsDep = Annotated[Settings, Depends(settings_of)]
EngineDep = Annotated[Engine, Depends(engine_of)]
