"""Pictures from a text, and from a text with up to four pictures."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.answers import ImagesResponse
from app.dependencies import Counted, CountingDep, ServicesDep
from app.disconnect import unless_disconnected
from app.errors import invalid, payload_too_large, unsupported_media_type
from app.image_events import EDIT, GENERATION, EventTypes, ImageEvents
from app.metrics import Counting
from app.multipart import read_form
from app.openapi import ERROR_RESPONSES, form_schema, image_responses, request_body, schema_of
from app.orders import Order, take_order
from app.schemas import ImageRequest, parse_form, parse_json
from app.streaming import EventStream

MAX_JSON_BYTES = 16 * 2**20  # it holds texts, no pictures; parsing holds up the event loop

router = APIRouter(prefix="/v1/images", tags=["images"], responses=ERROR_RESPONSES, dependencies=[Counted])


@router.post(
    "/generations",
    response_model=ImagesResponse,
    responses=image_responses(),
    openapi_extra=request_body(json=schema_of(ImageRequest)),
)
async def create_image(request: Request, services: ServicesDep, counting: CountingDep) -> Response:
    """Draw pictures from a prompt."""
    require_media_type(request, "application/json")
    fields = parse_json(await read_json(request), keep_unknown=services.settings.unknown_fields == "warn")
    return await answer(take_order(request, fields, [], services), fields, GENERATION, counting)


@router.post(
    "/edits",
    response_model=ImagesResponse,
    responses=image_responses(),
    openapi_extra=request_body(form=form_schema()),
)
async def edit_image(request: Request, services: ServicesDep, counting: CountingDep) -> Response:
    """Draw pictures from a prompt and one to four PNG, JPEG or WebP files; of an animation, from its first frame."""
    require_media_type(request, "multipart/form-data")
    form = await read_form(request, max_file_bytes=services.settings.max_image_bytes)
    fields = parse_form(form.texts, keep_unknown=services.settings.unknown_fields == "warn")
    if not form.images:
        raise invalid("Missing required parameter: 'image'.", param="image", code="missing_required_parameter")
    return await answer(take_order(request, fields, form.images, services), fields, EDIT, counting)


def require_media_type(request: Request, expected: str) -> None:
    """Raise 415 for another type of body, or one that would have to be unpacked first."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != expected:
        raise unsupported_media_type(f"This route takes '{expected}': set the content-type header.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise unsupported_media_type("Compressed bodies are not taken: leave out the content-encoding header.")


async def read_json(request: Request) -> bytes:
    """The body, if it is no longer than any that could make sense."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise payload_too_large(f"A JSON body may have {MAX_JSON_BYTES} bytes.")
    return bytes(body)


async def answer(order: Order, fields: ImageRequest, types: EventTypes, counting: Counting) -> Response:
    """Draw what was ordered, and send it all at once or as it comes."""
    services = order.services
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
            services=services,
            counting=counting,
        )
        counting.postpone()
        return EventStream(events.of(drawing), drawing.close, counting)
    async with drawing:
        result = await unless_disconnected(order.request.receive, drawing.result())
    body, file_s = await asyncio.to_thread(order.renderer.answer, result, order.warnings)
    services.metrics.delivered(result, file_s)
    return Response(body, media_type="application/json")
