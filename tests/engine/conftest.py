from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine


@asynccontextmanager
async def running(folder: Path, **config: object) -> AsyncIterator[Engine]:
    engine = Engine(EngineConfig(**{"model": str(folder), "worker": "inline", **config}))  # type: ignore[arg-type]
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(drain_s=0)
