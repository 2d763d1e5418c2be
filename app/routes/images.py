"""Pictures from a text, and from a text with up to four pictures."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.answering import answer
from app.answers import ImagesResponse
from app.bodies import FORM, JSON, MAX_TEXT_BYTES, lift_urls, media_type_of, read_body
from app.dependencies import Counted, CountingDep, ServicesDep
from app.errors import invalid
from app.image_events import EDIT, GENERATION
from app.multipart import MAX_IMAGES, read_form, too_many_images
from app.openapi import ERROR_RESPONSES, form_schema, image_responses, request_body, schema_of
from app.orders import take_order
from app.schemas import EditRequest, ImageRequest, parse_form, parse_json
from app.sources import ImageSource, source_of

router = APIRouter(prefix="/v1/images", tags=["images"], responses=ERROR_RESPONSES, dependencies=[Counted])


@router.post(
    "/generations",
    response_model=ImagesResponse,
    responses=image_responses(),
    openapi_extra=request_body(json=schema_of(ImageRequest)),
)
async def create_image(request: Request, services: ServicesDep, counting: CountingDep) -> Response:
    """Draw pictures from a prompt."""
    media_type_of(request, JSON)
    body = await read_body(request, MAX_TEXT_BYTES)
    fields = parse_json(body, ImageRequest, keep_unknown=services.keeps_unknown)
    return await answer(await take_order(request, fields, [], services), fields, GENERATION, counting)


@router.post(
    "/edits",
    response_model=ImagesResponse,
    responses=image_responses(),
    openapi_extra=request_body(form=form_schema(), json=schema_of(EditRequest)),
)
async def edit_image(request: Request, services: ServicesDep, counting: CountingDep) -> Response:
    """Draw pictures from a prompt and one to four PNG, JPEG or WebP images; of an animation, from its first frame."""
    if media_type_of(request, FORM, JSON) == FORM:
        form = await read_form(request, max_file_bytes=services.settings.max_image_bytes)
        fields, images = parse_form(form.texts, keep_unknown=services.keeps_unknown), form.images
    else:
        body = await read_body(request, services.settings.max_body_bytes)
        fields, images = await asyncio.to_thread(parse_edit, body, keep_unknown=services.keeps_unknown)
    if not images:
        raise invalid("Missing required parameter: 'image'.", param="image", code="missing_required_parameter")
    return await answer(await take_order(request, fields, images, services), fields, EDIT, counting)


def parse_edit(body: bytearray, *, keep_unknown: bool) -> tuple[ImageRequest, list[ImageSource]]:
    """The fields of an edit that came as JSON, and its images."""
    json_body = lift_urls(body)
    fields = parse_json(json_body.text, EditRequest, keep_unknown=keep_unknown)
    urls = [(reference.image_url, "images") for reference in fields.images or []]
    urls += [(url, "image") for url in fields.image or []]
    if len(urls) > MAX_IMAGES:
        raise too_many_images("image")
    return fields, [source_of(url, param=param, lifted=json_body.lifted) for url, param in urls]
