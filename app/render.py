"""From the engine's result to the answer's bytes."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence

from app.images import encode
from app.params import OutputOptions
from app.schemas import ImageData, ImagesResponse, InputTokensDetails, OutputTokensDetails, RequestMetrics, Usage
from engine.request import GenerationResult, Timings, TokenUsage


def render(result: GenerationResult, options: OutputOptions, warnings: Sequence[str]) -> tuple[bytes, float]:
    """The JSON body of OpenAI's image answer, and the seconds that its files took: run it in a thread."""
    started_s = time.perf_counter()
    files = [encode(image.pixels, options.format, options.background, options.compression) for image in result.images]
    file_s = time.perf_counter() - started_s
    height_px, width_px, _ = result.images[0].pixels.shape
    answer = ImagesResponse(
        created=int(time.time()),
        data=[
            ImageData(b64_json=base64.b64encode(file.data).decode(), seed=image.seed)
            for file, image in zip(files, result.images, strict=True)
        ],
        background="transparent" if any(file.transparent for file in files) else "opaque",
        output_format=options.format,
        quality=options.quality,
        size=f"{width_px}x{height_px}",
        usage=usage_of(result.usage),
        model=options.model,
        warnings=[*warnings, *result.warnings],
        metrics=metrics_of(result.timings, file_s),
    )
    return answer.model_dump_json().encode(), file_s


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
