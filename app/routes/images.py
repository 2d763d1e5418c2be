"""Pictures from a text, and from a text with up to four pictures."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.dependencies import Counted, EngineDep, MetricsDep, SettingsDep
from app.disconnect import unless_disconnected
from app.errors import ErrorBody, invalid, payload_too_large, unsupported_media_type
from app.images import decode_upload
from app.metrics import Metrics
from app.middleware import request_id_of
from app.multipart import MAX_IMAGES, read_form
from app.params import output_options, params_from, with_images, within
from app.render import render
from app.schemas import ImageRequest, ImagesResponse, parse_form, parse_json
from app.settings import Settings
from engine.engine import Engine
from engine.request import GenerationParams

MAX_JSON_BYTES = 16 * 2**20  # it holds texts, no pictures; parsing holds up the event loop

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 429, 499, 500, 503, 504)
}


def form_schema() -> dict[str, Any]:
    """The schema of a form: the fields of JSON without null, which a form can't say, and the files."""
    schema = ImageRequest.model_json_schema()
    fields = {}
    for name, field in schema["properties"].items():
        alternatives = [kind for kind in field.pop("anyOf", [field]) if kind.get("type") != "null"]
        field.pop("default", None)
        if alternatives:
            fields[name] = {**field, **alternatives[0]}
    files = {"type": "array", "maxItems": MAX_IMAGES, "items": {"type": "string", "format": "binary"}}
    images = {"image": files, "image[]": files}
    at_least_one = [{"required": [name]} for name in images]
    return {**schema, "properties": {**images, **fields}, "anyOf": at_least_one}


def request_body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI's word for a body that the route reads itself."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


router = APIRouter(prefix="/v1/images", tags=["images"], responses=ERROR_RESPONSES, dependencies=[Counted])


@router.post(
    "/generations",
    response_model=ImagesResponse,
    openapi_extra=request_body("application/json", ImageRequest.model_json_schema()),
)
async def create_image(request: Request, settings: SettingsDep, engine: EngineDep, metrics: MetricsDep) -> Response:
    """Draw pictures from a prompt."""
    require_media_type(request, "application/json")
    fields = parse_json(await read_json(request), keep_unknown=settings.unknown_fields == "warn")
    return await draw(request, fields, [], settings, engine, metrics)


@router.post(
    "/edits",
    response_model=ImagesResponse,
    openapi_extra=request_body("multipart/form-data", form_schema()),
)
async def edit_image(request: Request, settings: SettingsDep, engine: EngineDep, metrics: MetricsDep) -> Response:
    """Draw pictures from a prompt and one to four PNG, JPEG or WebP files; of an animation, from its first frame."""
    require_media_type(request, "multipart/form-data")
    form = await read_form(request, max_file_bytes=settings.max_image_bytes)
    fields = parse_form(form.texts, keep_unknown=settings.unknown_fields == "warn")
    if not form.images:
        raise invalid("Missing required parameter: 'image'.", param="image", code="missing_required_parameter")
    return await draw(request, fields, form.images, settings, engine, metrics)


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


async def draw(
    request: Request,
    fields: ImageRequest,
    uploads: list[bytes],
    settings: Settings,
    engine: Engine,
    metrics: Metrics,
) -> Response:
    """What every endpoint does with a request whose fields are valid. Empties `uploads`."""
    card = engine.card
    textual, warnings = params_from(fields, settings, card)
    textual = within(textual, request.headers.get("x-stainless-read-timeout"))
    options = output_options(fields, settings)

    def whole_params() -> GenerationParams:
        pictures = [decode_upload(data, max_pixels=settings.max_image_pixels) for data in uploads]
        uploads.clear()  # the request may wait long; its files need not wait with it
        return with_images(textual, pictures, settings, card)

    generating = engine.generate(whole_params if uploads else textual, request_id=request_id_of(request.scope))
    result = await unless_disconnected(request, generating)
    body, file_s = await asyncio.to_thread(render, result, options, warnings)
    metrics.delivered(result, file_s)
    return Response(body, media_type="application/json")
