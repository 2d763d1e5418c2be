"""Pictures as turns of a conversation: one choice an image, all at once or in deltas."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import to_json

from app.drawing import Drawing
from app.metrics import Metrics
from app.orders import Order
from app.render import Rendered, usage_of
from app.settings import ContentShape
from app.streaming import KEEPALIVE, data_line
from engine.request import Finished, GenerationResult, TokenUsage

DONE = b"data: [DONE]\n\n"


class ImageUrlPart(BaseModel):
    url: str


class ImageContent(BaseModel):
    type: Literal["image_url"] = "image_url"
    image_url: ImageUrlPart


class IndexedImage(ImageContent):
    """As it comes in a delta: its place among the pictures of its message."""

    index: int = 0


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str


Content = str | list[TextContent | ImageContent]


class AnswerMessage(BaseModel):
    """`images` carries the picture; `content` a short text, or by setting the picture as Markdown or as a part."""

    role: Literal["assistant"] = "assistant"
    content: Content
    images: list[ImageContent]
    refusal: None = None


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    seed: int
    finish_reason: Literal["stop"] = "stop"
    logprobs: None = None


class PromptTokensDetails(BaseModel):
    text_tokens: int
    image_tokens: int
    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    image_tokens: int
    reasoning_tokens: int = 0


class ChatUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatCompletion(BaseModel):
    """OpenAI's answer; seeds and warnings are on top."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage
    warnings: list[str]


class Sparse(BaseModel):
    """Absent fields are left out."""

    @model_serializer(mode="wrap")
    def _present(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class Delta(Sparse):
    role: Literal["assistant"] | None = None
    content: Content | None = None
    images: list[IndexedImage] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    seed: int | None = None
    finish_reason: Literal["stop"] | None = None


class ChatCompletionChunk(Sparse):
    """One piece of a streamed answer; the first one has the warnings."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None
    warnings: list[str] | None = None


@dataclass(slots=True)
class ChatAnswer:
    """Makes the answer to one request in chat. Its pictures are written in threads."""

    order: Order
    shape: ContentShape
    warnings: Sequence[str]
    include_usage: bool
    heartbeat_s: float
    metrics: Metrics
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        return self.order.renderer.options.model

    def whole(self, result: GenerationResult) -> tuple[bytes, float]:
        """The JSON body, and the seconds that its files took: run it in a thread."""
        started_s = time.perf_counter()
        choices = []
        for index, image in enumerate(result.images):
            content, picture = self._content(image.pixels, image.seed)
            choices.append(
                Choice(index=index, message=AnswerMessage(content=content, images=[picture]), seed=image.seed)
            )
        file_s = time.perf_counter() - started_s
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=chat_usage(result.usage),
            warnings=[*self.warnings, *result.warnings],
        )
        return to_json(answer), file_s

    async def chunks(self, drawing: Drawing) -> AsyncGenerator[bytes]:
        """The same in deltas: who speaks, as soon as the request is admitted; each picture when it is done."""
        beginnings = [
            ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
            for index in range(self.order.num_images)
        ]
        yield self._chunk(*beginnings, warnings=[*self.warnings, *drawing.admission.warnings])
        file_s = 0.0
        async for event in drawing.events(self.heartbeat_s):
            match event:
                case Finished(index, image):
                    started_s = time.perf_counter()
                    yield await asyncio.to_thread(self._picture_chunk, index, image.pixels, image.seed)
                    file_s += time.perf_counter() - started_s
                    yield self._chunk(ChunkChoice(index=index, delta=Delta(), finish_reason="stop"))
                case None:
                    yield KEEPALIVE
        result = await drawing.result()
        self.metrics.delivered(result, file_s)
        if self.include_usage:
            yield self._chunk(usage=chat_usage(result.usage))
        yield DONE

    def _picture_chunk(self, index: int, pixels: np.ndarray, seed: int) -> bytes:
        content, picture = self._content(pixels, seed)
        delta = Delta(content=content, images=[IndexedImage(image_url=picture.image_url)])
        return self._chunk(ChunkChoice(index=index, delta=delta, seed=seed))

    def _chunk(self, *choices: ChunkChoice, usage: ChatUsage | None = None, warnings: list[str] | None = None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=list(choices), usage=usage, warnings=warnings
        )
        return data_line(chunk)

    def _content(self, pixels: np.ndarray, seed: int) -> tuple[Content, ImageContent]:
        rendered = self.order.renderer.picture(pixels)
        picture = ImageContent(image_url=ImageUrlPart(url=url_of(rendered)))
        text = f"Here is the picture: {rendered.size}, seed {seed}."
        if self.shape == "markdown":
            return f"![{text}]({picture.image_url.url})", picture
        if self.shape == "parts":
            return [TextContent(text=text), picture], picture
        return text, picture


def url_of(picture: Rendered) -> str:
    return picture.url or f"data:{picture.file.media_type};base64,{picture.b64_json}"


def chat_usage(tokens: TokenUsage) -> ChatUsage:
    usage = usage_of(tokens)
    return ChatUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(
            text_tokens=usage.input_tokens_details.text_tokens, image_tokens=usage.input_tokens_details.image_tokens
        ),
        completion_tokens_details=CompletionTokensDetails(image_tokens=usage.output_tokens),
    )
