from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine, Observation
from tests.engine.faults import load_faulty_runner


@asynccontextmanager
async def running(
    folder: Path,
    *,
    faulty: bool = False,
    observe: Callable[[Observation], None] = lambda observation: None,
    **config: object,
) -> AsyncIterator[Engine]:
    """An engine on a checkpoint; inline, unless `worker="process"` is among the config."""
    chosen = EngineConfig(**{"model": str(folder), "worker": "inline", **config})  # type: ignore[arg-type]
    load = functools.partial(load_faulty_runner, chosen) if faulty else None
    engine = Engine(chosen, load=load)
    engine.on_observation(observe)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(drain_s=0)
