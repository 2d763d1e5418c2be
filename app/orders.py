"""From the fields of a request, whatever endpoint they came to, to what the engine draws and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from app.dependencies import Services
from app.disconnect import unless_disconnected
from app.drawing import Drawing
from app.images import decode_upload
from app.links import PictureFile
from app.middleware import request_id_of
from app.params import output_options, params_from, with_images, within
from app.render import Publish, Renderer
from app.schemas import ImageRequest
from app.sources import DataUrl, ImageSource, fetched
from engine.request import GenerationParams


@dataclass(frozen=True, slots=True)
class Order:
    """One request: what to draw, and how its client wants it."""

    request: Request
    params: GenerationParams | Callable[[], GenerationParams]
    num_images: int
    renderer: Renderer
    warnings: list[str]
    services: Services

    @property
    def request_id(self) -> str:
        return request_id_of(self.request.scope)

    async def admit(self) -> Drawing:
        """Hand it to the engine; return when it has its place. Raises `ClientDisconnect` if nobody waits for it."""
        admitting = Drawing.admit(self.services.engine, self.params, self.request_id)
        return await unless_disconnected(self.request.receive, admitting)


async def take_order(
    request: Request, fields: ImageRequest, sources: Sequence[ImageSource], services: Services
) -> Order:
    """Check `fields` and fetch what has to be fetched. Raises `ApiError`. Images are decoded on admission."""
    settings, card = services.settings, services.engine.card
    textual, warnings = params_from(fields, settings, card)
    textual = within(textual, request.headers.get("x-stainless-read-timeout"))
    renderer = Renderer(output_options(fields, settings), publisher(request, fields, services))

    uploads = await fetched(sources, services.fetch, services.links)

    def whole_params() -> GenerationParams:
        pictures = []
        for upload in uploads:
            data = upload.read(settings.max_image_bytes) if isinstance(upload, DataUrl) else upload
            pictures.append(decode_upload(data, max_pixels=settings.max_image_pixels))
        uploads.clear()  # the request may wait long; its files need not wait with it
        return with_images(textual, pictures, settings, card)

    params = whole_params if uploads else textual
    return Order(request, params, textual.num_images, renderer, warnings, services)


def publisher(request: Request, fields: ImageRequest, services: Services) -> Publish | None:
    """What makes links of pictures, if `fields` ask for links."""
    if fields.response_format != "url":
        return None
    base_url = services.settings.public_url or str(request.base_url)

    def publish(file: PictureFile) -> str:
        return services.links.publish(file, base_url)

    return publish
