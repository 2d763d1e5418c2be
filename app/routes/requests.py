"""A request that is being worked on, by the id that its own answer will carry: how far it is, and how to stop it."""

from __future__ import annotations

from fastapi import APIRouter

from app.answers import RequestDeleted, RequestState
from app.dependencies import EngineDep
from app.errors import ApiError, ErrorBody

router = APIRouter(prefix="/v1/images/requests", tags=["requests"], responses={404: {"model": ErrorBody}})


@router.get("/{request_id}")
async def request_state(request_id: str, engine: EngineDep) -> RequestState:
    """Where a request is: its place in the queue, its step, and when it will probably be done."""
    status = engine.status(request_id)
    if status is None:
        raise not_found()
    return RequestState(
        id=request_id,
        status="running" if status.running else "queued",
        position=status.position,
        step=status.step,
        num_steps=status.num_steps,
        eta_seconds=round(status.eta_s, 3),
    )


@router.delete("/{request_id}")
async def cancel_request(request_id: str, engine: EngineDep) -> RequestDeleted:
    """Cancel a request. Whoever waits for its pictures gets status 499."""
    if not engine.cancel(request_id):
        raise not_found()
    return RequestDeleted(id=request_id)


def not_found() -> ApiError:
    return ApiError(404, "No such request is waiting or running.", code="request_not_found")
