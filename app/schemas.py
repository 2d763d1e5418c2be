"""The fields a client may send and what it gets back, as OpenAI names them.

One schema judges JSON bodies and forms alike. It is strict: no `"2"`, `true` or `1.0` for an integer, no NaN. A form
has only texts, so there, and only there, a number or a boolean may be written as its JSON literal. What depends on
settings or on the model is checked in `app.params`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from app.errors import from_validation, invalid, printable
from app.images import OutputFormat

MAX_PROMPT_CHARS = 32_000
MAX_IMAGES_OUT, MAX_PARTIAL_IMAGES = 10, 3
MAX_JSON_TOKENS = 10_000
JSON_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{,]', re.DOTALL)  # a string, or what announces a further value
FORM = "form"  # the validation context of a form
JSON_SCALAR = re.compile(r"true|false|-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?")

OBJECT_FIELDS = ("stream_options",)

Quality = Literal["auto", "standard", "high", "hd", "max", "xhigh", "medium", "low"]


def from_form(value: object, info: ValidationInfo) -> object:
    """Read the JSON literal in a form's text; whatever else it holds is left for the strict type to refuse."""
    if info.context == FORM and isinstance(value, str) and JSON_SCALAR.fullmatch(value):
        return json.loads(value)
    return value


def object_from_form(value: object, info: ValidationInfo) -> object:
    """Read the JSON object in a form's text."""
    if info.context == FORM and isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def refuse_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("invalid_value", "Text must not contain NUL characters")
    return text


def refuse_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("invalid_value", "Text must not be blank")
    return text


def unsupported(*values: object) -> Callable[[object], object]:
    """A validator for values that mean something to OpenAI and nothing here yet."""

    def refuse(value: object) -> object:
        if value in values:
            raise PydanticCustomError("unsupported_parameter", "This value is not supported")
        return value

    return refuse


def refuse_any(value: object) -> object:
    if value is not None:
        raise PydanticCustomError("unsupported_parameter", "This parameter is not supported")
    return value


def url_of(value: object) -> object:
    """The URL itself, where it comes in an object as in chat."""
    return value["url"] if isinstance(value, dict) and value.keys() <= {"url", "detail"} and "url" in value else value


def as_list(value: object) -> object:
    return [value] if isinstance(value, str | dict) else value


ImageUrl = Annotated[str, Field(json_schema_extra={"format": "uri"}), BeforeValidator(url_of)]
Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARS), AfterValidator(refuse_nul)]
FormLiteral = BeforeValidator(from_form)  # last in a type, so that the limits before it reach the OpenAPI document
Name = Annotated[str, Field(max_length=512)]


class StreamOptions(BaseModel):
    """What a stream carries besides pictures."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_progress: Annotated[bool, FormLiteral] | None = Field(
        None, description="Also send `image_generation.progress` or `image_edit.progress` events."
    )


class PictureFields(BaseModel):
    """What every endpoint takes besides its prompt. null means the same as leaving the field out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: Name | None = Field(None, description="Served name or one of its aliases.")
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES_OUT), FormLiteral] | None = Field(
        None, description="Image i uses seed + i."
    )
    size: Name | None = Field(None, description="`auto`, or WIDTHxHEIGHT in pixels.", examples=["1024x1024"])
    quality: Quality | None = Field(None, description="`medium` and `low` take fewer steps, the others all.")
    background: Literal["auto", "transparent", "opaque"] | None = None
    output_format: Annotated[OutputFormat, BeforeValidator(unsupported("svg", "gif"))] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100), FormLiteral] | None = Field(
        None, description="Quality of webp and jpeg; 100 if absent."
    )
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="`url`: links that expire instead of the pictures themselves."
    )
    stream: Annotated[bool, FormLiteral] | None = Field(None, description="Send events instead of one answer.")
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIAL_IMAGES), FormLiteral] | None = Field(
        None, description="How many pictures of each image a stream shows while it is being made."
    )
    background_job: Annotated[bool, FormLiteral] | None = Field(
        None, description="Answer 202 at once; the pictures are kept at /v1/images/requests/{id}/result."
    )
    stream_options: Annotated[StreamOptions, BeforeValidator(object_from_form)] | None = None
    mask: Annotated[None, BeforeValidator(refuse_any)] = None
    markup: Annotated[None, BeforeValidator(refuse_any)] = None
    svg: Annotated[None, BeforeValidator(refuse_any)] = None
    frame_count: Annotated[None, BeforeValidator(refuse_any)] = None
    frame_duration_ms: Annotated[None, BeforeValidator(refuse_any)] = None

    user: Name | None = Field(None, description="No effect.")
    safety_identifier: Name | None = Field(None, description="No effect.")
    moderation: Literal["auto", "low"] | None = Field(None, description="No effect.")
    style: Literal["vivid", "natural"] | None = Field(None, description="No effect.")
    input_fidelity: Literal["high", "low"] | None = Field(None, description="No effect.")
    complexity: Literal["low", "medium", "high"] | None = Field(None, description="No effect.")
    cache: Annotated[bool, FormLiteral] | None = Field(
        None, description="Allow to skip work from step to step. No effect yet: every step is computed."
    )

    seed: Annotated[int, Field(ge=-1, lt=2**32), FormLiteral] | None = Field(None, description="-1 or absent: random.")
    num_inference_steps: Annotated[int, Field(ge=1, le=200), FormLiteral] | None = None
    true_cfg_scale: Annotated[float, Field(ge=0, le=20), FormLiteral] | None = None
    negative_prompt: Text | None = None
    resolution: Annotated[int, Field(ge=1), FormLiteral] | None = Field(
        None, description="Condition images and `auto` sizes have about resolution² pixels."
    )
    timeout_s: Annotated[float, Field(gt=0, le=3600), FormLiteral] | None = Field(
        None, description="A request that can't be done in this many seconds is refused or given up."
    )
    priority: Annotated[int, Field(ge=-10, le=10), FormLiteral] | None = Field(
        None, description="Among waiting requests the higher one goes first; 0 if absent."
    )
    deterministic: Annotated[bool, FormLiteral] | None = Field(
        None, description="Run alone, so that requests that come at the same time can't change the rounding."
    )


class ImageRequest(PictureFields):
    """A request for pictures."""

    prompt: Annotated[Text, AfterValidator(refuse_blank)]


class ImageReference(BaseModel):
    """A picture by its URL."""

    model_config = ConfigDict(strict=True, extra="forbid")

    image_url: ImageUrl
    file_id: Annotated[None, BeforeValidator(refuse_any)] = None


class EditRequest(ImageRequest):
    """A request for changed pictures as JSON: their URLs are in `images`, or, as others spell it, in `image`."""

    images: list[ImageReference] | None = None
    image: Annotated[list[ImageUrl], BeforeValidator(as_list)] | None = Field(
        None, description="The same as `images`, as bare URLs; one need not be in a list."
    )


M = TypeVar("M", bound=BaseModel)


def parse_json(body: bytes | bytearray, model: type[M], *, keep_unknown: bool) -> M:
    """Judge a JSON body. With `keep_unknown`, unknown fields end up in `model_extra`. Raises `ApiError`."""
    refuse_crowd(body)
    try:
        request = model.model_validate_json(body, extra="allow" if keep_unknown else "forbid")
        json.dumps(request.model_extra, allow_nan=False)  # fields that have a type refuse NaN themselves
    except ValidationError as error:
        raise from_validation(error) from error
    except ValueError as error:
        raise invalid("Numbers must be finite.") from error
    return request


def refuse_crowd(body: bytes | bytearray) -> None:
    """Bound the number of values before they become objects: a large body of small ones would take gigabytes.

    Counting bytes is enough for all but texts that are full of commas.
    """
    if sum(body.count(byte) for byte in b",[{") < MAX_JSON_TOKENS:
        return
    if next(islice(JSON_TOKEN.finditer(body), MAX_JSON_TOKENS, None), None):
        raise invalid("The JSON body holds too many values.", code="invalid_json")


def put_field(values: dict[str, object], name: str, text: str) -> None:
    """Put a form's field in its place: `stream_options[include_progress]` is a field of an object."""
    outer, _, inner = name.removesuffix("]").partition("[")
    if outer in OBJECT_FIELDS and name == f"{outer}[{inner}]":
        fields = values.setdefault(outer, {})
        if isinstance(fields, dict):
            fields[inner] = text
    else:
        values[name] = text


def parse_form(texts: dict[bytes, bytes], *, keep_unknown: bool) -> ImageRequest:
    """Judge the text fields of a form, as `parse_json` does a body."""
    values: dict[str, object] = {}
    for name_bytes, value in texts.items():
        name = name_bytes.decode("utf-8", errors="replace")
        try:
            put_field(values, name, value.decode())
        except UnicodeDecodeError as error:
            if name not in ImageRequest.model_fields:
                raise invalid(
                    f"Unknown parameter: '{printable(name)}'.", param=name, code="unknown_parameter"
                ) from error
            raise invalid("A form field is not valid UTF-8.", param=name) from error
    try:
        return ImageRequest.model_validate(values, extra="allow" if keep_unknown else "forbid", context=FORM)
    except ValidationError as error:
        raise from_validation(error) from error
