"""From the engine's pictures to the bytes that a client gets. Slow: all of it belongs in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pybase64
from pydantic_core import to_json

from app.answers import (
    EffectiveBackground,
    ImagesResponse,
    InlineImage,
    InputTokensDetails,
    LinkedImage,
    OutputTokensDetails,
    RequestMetrics,
    Usage,
)
from app.images import encode
from app.links import PictureFile
from app.params import OutputOptions
from engine.request import GenerationResult, Timings, TokenUsage

Publish = Callable[[PictureFile], str]  # keeps a file and returns its link


@dataclass(frozen=True, slots=True)
class Rendered:
    """A picture as its client gets it: the file, or its link instead."""

    file: PictureFile
    background: EffectiveBackground
    size: str
    b64_json: str | None
    url: str | None


@dataclass(frozen=True, slots=True)
class Renderer:
    """Writes pictures the way one request asks for. Without `publish` they go inline."""

    options: OutputOptions
    publish: Publish | None

    def file(self, result: GenerationResult) -> tuple[PictureFile, float]:
        """The one picture of a request as it is, and the seconds that it took."""
        started_s = time.perf_counter()
        file, _ = self._write(result.images[0].pixels)
        return file, time.perf_counter() - started_s

    def picture(self, pixels: np.ndarray) -> Rendered:
        file, transparent = self._write(pixels)
        return Rendered(
            file,
            background="transparent" if transparent else "opaque",
            size=f"{pixels.shape[1]}x{pixels.shape[0]}",
            b64_json=None if self.publish else pybase64.b64encode_as_string(file.data),
            url=self.publish(file) if self.publish else None,
        )

    def _write(self, pixels: np.ndarray) -> tuple[PictureFile, bool]:
        options = self.options
        encoded = encode(pixels, options.format, options.background, options.compression)
        return PictureFile(encoded.data, options.format), encoded.transparent

    def answer(self, result: GenerationResult, warnings: Sequence[str]) -> tuple[bytes, float]:
        """The JSON body of OpenAI's image answer, and the seconds that its files took."""
        started_s = time.perf_counter()
        pictures = [self.picture(image.pixels) for image in result.images]
        file_s = time.perf_counter() - started_s
        answer = ImagesResponse(
            created=int(time.time()),
            data=[image_data(picture, image.seed) for picture, image in zip(pictures, result.images, strict=True)],
            background="transparent" if any(p.background == "transparent" for p in pictures) else "opaque",
            output_format=self.options.format,
            quality=self.options.quality,
            size=pictures[0].size,
            usage=usage_of(result.usage),
            model=self.options.model,
            warnings=[*warnings, *result.warnings],
            metrics=metrics_of(result.timings, file_s),
        )
        return to_json(answer), file_s


def image_data(picture: Rendered, seed: int) -> InlineImage | LinkedImage:
    if picture.url is not None:
        return LinkedImage(url=picture.url, seed=seed)
    return InlineImage(b64_json=picture.b64_json or "", seed=seed)


def metrics_of(timings: Timings, file_s: float) -> RequestMetrics:
    return RequestMetrics(
        queue_seconds=round(timings.queue_s, 6),
        encode_seconds=round(timings.encode_s, 6),
        prefill_seconds=round(timings.prefill_s, 6),
        steps_seconds=round(timings.steps_s, 6),
        decode_seconds=round(timings.decode_s, 6),
        file_seconds=round(file_s, 6),
        batch_size=round(timings.batch_size, 3),
    )


def usage_of(tokens: TokenUsage) -> Usage:
    input_tokens = tokens.text_tokens + tokens.condition_image_tokens
    return Usage(
        input_tokens=input_tokens,
        input_tokens_details=InputTokensDetails(
            text_tokens=tokens.text_tokens, image_tokens=tokens.condition_image_tokens
        ),
        output_tokens=tokens.output_image_tokens,
        output_tokens_details=OutputTokensDetails(image_tokens=tokens.output_image_tokens, text_tokens=0),
        total_tokens=input_tokens + tokens.output_image_tokens,
    )
