"""Pictures behind the links of `response_format: "url"`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.dependencies import ServicesDep
from app.errors import ApiError, ErrorBody
from app.links import FILES_PATH

router = APIRouter(tags=["images"], responses={status: {"model": ErrorBody} for status in (401, 403, 404)})

PICTURE = {"schema": {"type": "string", "format": "binary"}}


@router.get(
    FILES_PATH + "{name}",
    response_class=Response,
    responses={200: {"content": {f"image/{kind}": PICTURE for kind in ("png", "webp", "jpeg")}}},
)
async def linked_image(name: str, request: Request, services: ServicesDep) -> Response:
    """A picture, for whoever has its signed link, with or without a key."""
    if not services.links.admits(request.scope["path"], request.url.query):
        raise ApiError(403, "The link has expired or is not complete.", code="invalid_link")
    file = services.links.open(name)
    if file is None:
        raise ApiError(404, "The picture is no longer kept.", code="file_not_found")
    headers = {"cache-control": "private, max-age=3600", "x-content-type-options": "nosniff"}
    return Response(file.data, media_type=file.media_type, headers=headers)
