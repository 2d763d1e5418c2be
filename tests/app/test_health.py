"""Probes, and the life of the service around them: loading, failing to load, stopping."""

from __future__ import annotations

import asyncio

import pytest

from app.main import create_app
from app.settings import Settings
from engine.engine import EngineState

READY = ["/health/ready", "/health", "/v1/health"]


async def test_live_at_once_ready_when_loaded(connect, engine, refused):
    engine.may_load.clear()
    client = await connect()
    assert (await client.get("/health/live")).status_code == 200
    for path in READY:
        response = await client.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "loading")
        assert response.json()["reason"]
        assert response.headers["retry-after"]
    response = await client.post("/v1/images/generations", json={"prompt": "a"})
    refused(response, 503, code="not_ready")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")

    engine.may_load.set()
    await asyncio.sleep(0.01)
    for path in READY:
        assert (await client.get(path)).json() == {"status": "ready", "running": 0, "waiting": 0}


@pytest.mark.parametrize(
    "state", [EngineState.RESTARTING, EngineState.DRAINING, EngineState.STOPPED, EngineState.FAILED]
)
async def test_not_ready_says_why(client, engine, state):
    engine.state = state
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()["status"]) == (503, state.value)
    assert response.json()["reason"] and response.headers["retry-after"]
    assert (await client.get("/health/live")).status_code == (503 if state == EngineState.FAILED else 200)


async def test_failure_to_load_is_reported_and_stops_the_server(engine):
    app = create_app(Settings(), engine)
    stopped = asyncio.Event()
    app.state.stop_server = stopped.set
    engine.load_error = OSError("model.safetensors is truncated")
    async with app.router.lifespan_context(app):
        await asyncio.wait_for(stopped.wait(), 1)
        assert app.state.failure == "the model could not be loaded: model.safetensors is truncated"


async def test_worker_that_cannot_be_replaced_stops_the_server(engine):
    app = create_app(Settings(), engine)
    stopped = asyncio.Event()
    app.state.stop_server = stopped.set
    async with app.router.lifespan_context(app):
        engine.give_up("the worker can't be started again: exit status 70")
        await asyncio.wait_for(stopped.wait(), 1)
    assert app.state.failure == "the worker can't be started again: exit status 70"


async def test_shutdown_drains(engine):
    app = create_app(Settings(drain_seconds=3), engine)
    async with app.router.lifespan_context(app):
        pass
    assert engine.drained_s == 3
    assert app.state.failure is None


async def test_shutdown_while_loading(engine):
    engine.may_load.clear()
    app = create_app(Settings(), engine)
    async with app.router.lifespan_context(app):
        pass
    assert engine.state == EngineState.STOPPED
    assert app.state.failure is None
