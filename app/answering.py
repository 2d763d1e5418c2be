"""The ways in which the answer to an order for pictures leaves: as JSON, as a file, as a stream, or later."""

from __future__ import annotations

import asyncio

from fastapi.responses import JSONResponse, Response

from app.answers import RequestState
from app.bodies import JSON
from app.dependencies import Services
from app.disconnect import unless_disconnected
from app.drawing import Drawing
from app.errors import ApiError, retry_after
from app.image_events import EventTypes, ImageEvents
from app.jobs import FinishedJob, Job
from app.metrics import Counting
from app.orders import Order
from app.schemas import ImageRequest
from app.streaming import EventStream

REQUESTS_PATH = "/v1/images/requests"


async def answer(order: Order, fields: ImageRequest, types: EventTypes, counting: Counting) -> Response:
    """Have drawn what was ordered, and send it the way `fields` ask for."""
    if fields.background_job:
        return await answer_later(order, counting)
    drawing = await order.admit()
    if fields.stream:
        options = fields.stream_options
        events = ImageEvents(
            types,
            order.request_id,
            order.num_images,
            order.renderer,
            order.warnings,
            include_progress=bool(options and options.include_progress),
            services=order.services,
            counting=counting,
        )
        counting.postpone()
        return EventStream(events.of(drawing), drawing.close, counting)
    return await unless_disconnected(order.request.receive, finish(order, drawing))


async def finish(order: Order, drawing: Drawing) -> Response:
    """The whole answer, once everything is drawn."""
    async with drawing:
        result = await drawing.result()
    if order.as_file:
        file, file_s = await asyncio.to_thread(order.renderer.file, result)
        warnings = " ".join([*order.warnings, *result.warnings]).encode("ascii", "replace").decode()
        headers = {"x-easel-seed": str(result.images[0].seed), **({"x-easel-warnings": warnings} if warnings else {})}
        response = Response(file.data, media_type=file.media_type, headers=headers)
    else:
        body, file_s = await asyncio.to_thread(order.renderer.answer, result, order.warnings)
        response = Response(body, media_type=JSON)
    order.services.metrics.delivered(result, file_s)
    return response


async def answer_later(order: Order, counting: Counting) -> Response:
    """Status 202 as soon as the request has its place; the answer is kept for whoever comes for it."""
    jobs = order.services.jobs
    jobs.check_new(order.request_id)
    drawing = await order.admit()
    job = Job(order.request_id, drawing.admission.num_steps * order.num_images)
    try:
        jobs.start(job, lambda: finish(order, drawing), counting)
    except ApiError:
        await drawing.close()
        raise
    counting.postpone()
    return accepted(order.request_id, order.services)


def accepted(request_id: str, services: Services) -> Response:
    """Status 202: where the job is, where its answer will be, and when to come again."""
    state = state_of(request_id, services)
    headers = {**retry_after(state.eta_seconds), "location": f"{REQUESTS_PATH}/{request_id}"}
    return JSONResponse(state.model_dump(exclude_none=True), 202, headers)


def state_of(request_id: str, services: Services) -> RequestState:
    """Raises `ApiError` with status 404 when there is no such request."""
    job, status = services.jobs.find(request_id), services.engine.status(request_id)
    state = RequestState(id=request_id, status="running", position=0, step=0, num_steps=0, eta_seconds=0)
    if job is not None:
        state.num_steps, state.result = job.num_steps, f"{REQUESTS_PATH}/{request_id}/result"
    if isinstance(job, FinishedJob):
        state.status, state.error = ("failed", job.error.detail) if job.error else ("completed", None)
        state.step = 0 if job.error else job.num_steps
    elif status is not None:
        state.status, state.position = "running" if status.running else "queued", status.position
        state.step, state.num_steps = status.step, status.num_steps
        state.eta_seconds = round(status.eta_s, 3)
    elif job is not None:
        state.step = job.num_steps  # its files are being written
    else:
        raise ApiError(404, "No such request is waiting or running.", code="request_not_found")
    return state
