"""A request by the id that its own answer carries: how far it is, how to stop it, and, of a job, what came of it."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from app.answering import REQUESTS_PATH, accepted, state_of
from app.answers import ImagesResponse, RequestDeleted, RequestState
from app.dependencies import ServicesDep
from app.errors import ApiError, ErrorBody
from app.jobs import FinishedJob

router = APIRouter(prefix=REQUESTS_PATH, tags=["requests"], responses={404: {"model": ErrorBody}})


@router.get("/{request_id}", response_model_exclude_none=True)
async def request_state(request_id: str, services: ServicesDep) -> RequestState:
    """Where a request is: its place in the queue, its step, and when it will probably be done. A background job is
    known for a while after it is done."""
    return state_of(request_id, services)


@router.get(
    "/{request_id}/result",
    response_model=ImagesResponse,
    responses={202: {"model": RequestState, "description": "Not done yet."}},
)
async def job_result(request_id: str, services: ServicesDep) -> Response:
    """The answer to a background job, whatever it is: pictures, or the error that the request ended with."""
    job = services.jobs.find(request_id)
    if job is None:
        raise ApiError(404, "There is no background job of this id.", code="request_not_found")
    if not isinstance(job, FinishedJob):
        return accepted(request_id, services)
    headers = {name: value for name, value in job.answer.headers.items() if name != "content-length"}
    return Response(job.answer.body, job.answer.status_code, headers)


@router.delete("/{request_id}")
async def cancel_request(request_id: str, services: ServicesDep) -> RequestDeleted:
    """Cancel a request; whoever waits for its pictures gets status 499. Of a job that is done, drop the answer."""
    if not services.engine.cancel(request_id) and not services.jobs.forget(request_id):
        raise ApiError(404, "No such request is waiting or running.", code="request_not_found")
    return RequestDeleted(id=request_id)
