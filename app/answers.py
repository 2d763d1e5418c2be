"""What a client gets back, as OpenAI names it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from app.errors import ErrorDetail
from app.images import OutputFormat

EffectiveBackground = Literal["transparent", "opaque"]
EffectiveQuality = Literal["low", "medium", "high"]


class InlineImage(BaseModel):
    """One picture, and the seed that draws it again."""

    b64_json: str
    seed: int


class LinkedImage(BaseModel):
    """The same, for `response_format` url: the link needs no key and expires."""

    url: str
    seed: int


class InputTokensDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class OutputTokensDetails(BaseModel):
    image_tokens: int
    text_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class RequestMetrics(BaseModel):
    """Where the time went. `batch_size` is the mean number of pictures that shared a denoise step."""

    queue_seconds: float
    encode_seconds: float
    prefill_seconds: float
    steps_seconds: float
    decode_seconds: float
    file_seconds: float
    batch_size: float


class ImagesResponse(BaseModel):
    """OpenAI's answer, with `model`, `warnings`, `metrics` and the seeds on top."""

    created: int
    data: list[InlineImage | LinkedImage]
    background: EffectiveBackground
    output_format: OutputFormat
    quality: EffectiveQuality
    size: str
    usage: Usage
    model: str
    warnings: list[str]
    metrics: RequestMetrics


class PartialImageEvent(BaseModel):
    """What a picture will probably look like. `image_index` is there if there are several."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    b64_json: str | None = None
    url: str | None = None
    background: EffectiveBackground
    created_at: int
    output_format: OutputFormat
    partial_image_index: int
    quality: EffectiveQuality
    size: str
    image_index: int | None = None


class CompletedEvent(BaseModel):
    """One finished picture. The usage of a request's events adds up to that of its plain answer."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    b64_json: str | None = None
    url: str | None = None
    background: EffectiveBackground
    created_at: int
    output_format: OutputFormat
    quality: EffectiveQuality
    size: str
    usage: Usage
    seed: int
    model: str
    warnings: list[str]
    image_index: int | None = None


class RequestState(BaseModel):
    """Where a request is. `position` is 0 once it runs; steps count over all its pictures. Of a job, `result` is where
    its answer is or will be, and `error` why it failed."""

    id: str
    object: Literal["image.request"] = "image.request"
    status: Literal["running", "queued", "completed", "failed"]
    position: int
    step: int
    num_steps: int
    eta_seconds: float
    result: str | None = None
    error: ErrorDetail | None = None


class ProgressEvent(BaseModel):
    """Where a streamed request is; only if `stream_options` asks for it."""

    type: Literal["image_generation.progress", "image_edit.progress"]
    status: Literal["running", "queued"]
    position: int
    step: int
    num_steps: int
    eta_seconds: float


class RequestDeleted(BaseModel):
    id: str
    object: Literal["image.request"] = "image.request"
    deleted: Literal[True] = True
