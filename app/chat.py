"""A conversation as a request for pictures.

The last user turn is the order: its text is the prompt, its images are the condition images. If it has none, the last
picture that the assistant made in the conversation is changed. Whatever else was said has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from app.bodies import lift_urls
from app.errors import from_validation, invalid
from app.multipart import MAX_IMAGES, too_many_images
from app.schemas import ImageRequest, ImageUrl, PictureFields, parse_json, refuse_any, unsupported
from app.sources import ImageSource, source_of

MAX_PARTS = 256  # of all messages
MARKDOWN_IMAGE = re.compile(r"!\[[^\]]{0,1000}\]\(\s*<?((?:data|https?):[^\s)>]*)", re.IGNORECASE)
OTHER_PARTS = ("input_audio", "audio_url", "file", "video_url")

Refused = Annotated[None, BeforeValidator(refuse_any)]
Strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def refuse_some(value: object) -> object:
    """Nothing, or an empty list, is no wish."""
    return None if value == [] else refuse_any(value)


Absent = Annotated[None, BeforeValidator(refuse_some)]


def as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Part(BaseModel):
    """A text, or a picture by its URL. `index` is in our streams, and comes back from clients that collect deltas."""

    model_config = Strict

    type: Annotated[Literal["text", "image_url"], BeforeValidator(unsupported(*OTHER_PARTS))]
    text: str | None = None
    image_url: ImageUrl | None = None
    index: int | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if (self.text is not None, self.image_url is not None) != (self.type == "text", self.type == "image_url"):
            raise PydanticCustomError("invalid_value", "A part must have what its type says, and nothing else")
        return self


class Message(BaseModel):
    """One turn. What the SDK hands back of an answer of ours is taken as it is."""

    model_config = Strict

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], BeforeValidator(as_parts, json_schema_input_type=str | list[Part])] | None = None
    images: list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: Absent = None
    audio: Absent = None
    function_call: Absent = None
    tool_calls: Absent = None

    def texts(self) -> Iterator[str]:
        yield from (part.text for part in self.content or () if part.text is not None)

    def image_urls(self) -> Iterator[str]:
        """The pictures of this turn, in order; an assistant's may also be in the Markdown of its text."""
        yield from (part.image_url for part in self.content or () if part.image_url is not None)
        if self.role == "assistant":
            yield from (match[1] for text in self.texts() for match in MARKDOWN_IMAGE.finditer(text))
        yield from (part.image_url for part in self.images or () if part.image_url is not None)


class ChatStreamOptions(BaseModel):
    model_config = Strict

    include_usage: bool | None = Field(None, description="Send the usage in a last chunk without choices.")
    include_obfuscation: bool | None = Field(None, description="No effect.")


class TextFormat(BaseModel):
    """What chat calls `response_format`; only its default is supported."""

    model_config = Strict

    type: Literal["text"]


class ChatRequest(PictureFields):
    """A conversation, and the fields of a request for pictures. OpenAI's fields for texts have no effect."""

    messages: Annotated[list[Message], Field(min_length=1)]
    stream_options: ChatStreamOptions | None = None  # type: ignore[assignment]
    response_format: Literal["b64_json", "url"] | TextFormat | None = None  # type: ignore[assignment]
    modalities: list[Literal["text", "image"]] | None = None

    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    tools: Absent = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Absent = None
    function_call: Literal["none", "auto"] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None


SILENT = ("metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention")
TEXT_FIELDS = tuple(
    name
    for name in ChatRequest.model_fields
    if name not in (*PictureFields.model_fields, *SILENT, "messages", "modalities", "tool_choice", "function_call")
)


def order_of(body: bytearray, *, keep_unknown: bool) -> tuple[ChatRequest, ImageRequest, list[ImageSource]]:
    """The conversation, what it asks for, and the pictures it is made from. Raises `ApiError`."""
    json_body = lift_urls(body)
    chat = parse_json(json_body.text, ChatRequest, keep_unknown=keep_unknown)
    check_size(chat)
    turn = next((message for message in reversed(chat.messages) if message.role == "user"), None)
    if turn is None:
        raise invalid("The conversation has no user message.", param="messages", code="missing_required_parameter")
    urls = list(turn.image_urls())
    if not urls:
        made = [url for message in chat.messages if message.role == "assistant" for url in message.image_urls()]
        urls = made[-1:]
    fields: dict[str, Any] = {name: getattr(chat, name) for name in PictureFields.model_fields}
    fields |= {"prompt": "\n".join(turn.texts()), "stream_options": None, "partial_images": None}
    fields |= chat.model_extra or {}
    fields["response_format"] = None if isinstance(chat.response_format, TextFormat) else chat.response_format
    try:
        request = ImageRequest.model_validate(fields, extra="allow")
    except ValidationError as error:  # only the prompt is new
        raise from_validation(error, param="messages") from error
    return chat, request, [source_of(url, param="messages", lifted=json_body.lifted) for url in urls]


def check_size(chat: ChatRequest) -> None:
    """Bound what is looked at, before anything is decoded."""
    num_parts = sum(len(message.content or ()) for message in chat.messages)
    if num_parts > MAX_PARTS:
        raise invalid(f"The messages have more than {MAX_PARTS} parts.", param="messages")
    sent = [url for message in chat.messages if message.role == "user" for url in message.image_urls()]
    if len(sent) > MAX_IMAGES:
        raise too_many_images("messages")


def warnings_of(chat: ChatRequest) -> list[str]:
    warnings = [f"'{name}' has no effect here." for name in TEXT_FIELDS if getattr(chat, name) not in (None, False)]
    if any(message.role in ("system", "developer") for message in chat.messages):
        warnings.append("System and developer messages have no effect.")
    if chat.partial_images:
        warnings.append("'partial_images' has no effect in chat.")
    return warnings
