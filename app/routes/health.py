"""Probes: live while the process can recover by itself, ready while it takes requests. Open even when keys are set."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from app.dependencies import EngineDep
from app.errors import retry_after
from engine.engine import Engine, EngineState

RETRY_AFTER_S = 5.0
REASONS = {
    EngineState.LOADING: "The model is being loaded.",
    EngineState.RESTARTING: "The model's process has died and is being replaced.",
    EngineState.DRAINING: "The server is shutting down.",
    EngineState.STOPPED: "The server has shut down.",
    EngineState.FAILED: "The model could not be loaded or has failed; the server's log says why.",
}

router = APIRouter(tags=["health"])


@router.get("/health/live", responses={503: {"description": "The engine has failed for good."}})
async def live(engine: EngineDep) -> Response:
    if engine.state == EngineState.FAILED:
        return not_ready(engine)
    return JSONResponse({"status": "live"})


@router.get("/health/ready", responses={503: {"description": "Loading, restarting, draining or failed."}})
@router.get("/health", include_in_schema=False)
@router.get("/v1/health", include_in_schema=False)
async def ready(engine: EngineDep) -> Response:
    if engine.state != EngineState.READY:
        return not_ready(engine)
    return JSONResponse({"status": "ready", "running": engine.num_running, "waiting": engine.num_waiting})


def not_ready(engine: Engine) -> Response:
    state = engine.state
    return JSONResponse({"status": state.value, "reason": REASONS[state]}, 503, retry_after(RETRY_AFTER_S))
