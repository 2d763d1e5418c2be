"""From the fields of a request, whatever endpoint they came to, to what the engine draws and how it is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from starlette.requests import Request

from app.dependencies import Services
from app.disconnect import unless_disconnected
from app.drawing import Drawing
from app.fetching import fetched
from app.images import OutputFormat, decode_upload
from app.links import PictureFile
from app.middleware import request_id_of
from app.params import output_options, params_from, with_images, within
from app.render import Publish, Renderer
from app.schemas import ImageRequest
from app.sources import DataUrl, ImageSource, RemoteImage, without_own_links
from engine.request import GenerationParams


@dataclass(frozen=True, slots=True)
class Order:
    """One request: what to draw, and how its client wants it."""

    request: Request
    params: GenerationParams | Callable[[], GenerationParams]
    prefetch: Callable[[], Awaitable[None]]
    num_images: int
    as_file: bool  # the client wants its one picture as it is, without JSON around it
    renderer: Renderer
    warnings: list[str]
    services: Services

    @property
    def request_id(self) -> str:
        return request_id_of(self.request.scope)

    async def admit(self) -> Drawing:
        """Hand it to the engine; return when it has its place. Raises `ClientDisconnect` if nobody waits for it."""
        admitting = Drawing.admit(self.services.engine, self.params, self.request_id, self.prefetch)
        return await unless_disconnected(self.request.receive, admitting)


async def take_order(
    request: Request, fields: ImageRequest, sources: Sequence[ImageSource], services: Services
) -> Order:
    """Check `fields`. Raises `ApiError`. Images are fetched and decoded on admission."""
    settings, card = services.settings, services.engine.card
    textual, warnings = params_from(fields, settings, card)
    if not fields.background_job:  # nobody waits for that
        textual = within(textual, request.headers.get("x-stainless-read-timeout"))
    as_file, file_format = accepted_file(request.headers.get("accept", ""))
    as_file = as_file and textual.num_images == 1
    options = output_options(fields, settings, file_format if as_file else "png")
    renderer = Renderer(options, publisher(request, fields, services))

    named = without_own_links(sources, services.links)
    for source in named:
        if isinstance(source, RemoteImage):
            services.fetcher.check(source)
    uploads: list[bytes | DataUrl] = []

    async def prefetch() -> None:
        uploads.extend(await fetched(named, services.fetcher))
        named.clear()

    def whole_params() -> GenerationParams:
        pictures = []
        for upload in uploads:
            data = upload.read(settings.max_image_bytes) if isinstance(upload, DataUrl) else upload
            pictures.append(decode_upload(data, max_pixels=settings.max_image_pixels))
        uploads.clear()  # the request may wait long; its files need not wait with it
        return with_images(textual, pictures, settings, card)

    params = whole_params if named else textual
    return Order(request, params, prefetch, textual.num_images, as_file, renderer, warnings, services)


def accepted_file(accept: str) -> tuple[bool, OutputFormat]:
    """Whether an Accept header asks for an image, not for JSON as well, and for which kind."""
    types = [kind.partition(";")[0].strip().lower() for kind in accept.split(",")]
    images = [kind.removeprefix("image/") for kind in types if kind.startswith("image/")]
    as_file = bool(images) and not any(kind.startswith(("application/", "text/")) for kind in types)
    return as_file, next((kind for kind in get_args(OutputFormat) if kind in images), "png")


def publisher(request: Request, fields: ImageRequest, services: Services) -> Publish | None:
    """What makes links of pictures, if `fields` ask for links."""
    if fields.response_format != "url":
        return None
    base_url = services.settings.public_url or str(request.base_url)

    def publish(file: PictureFile) -> str:
        return services.links.publish(file, base_url)

    return publish
