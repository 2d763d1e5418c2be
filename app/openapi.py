"""What FastAPI can't derive of the OpenAPI document: bodies that routes read themselves, and streams of events."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel

from app.answers import CompletedEvent, PartialImageEvent, ProgressEvent, RequestState
from app.errors import ErrorBody, ErrorDetail
from app.images import OutputFormat
from app.multipart import MAX_IMAGES
from app.schemas import ImageRequest

Schema = dict[str, Any]

ERROR_RESPONSES: dict[int | str, Schema] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 413, 415, 429, 499, 500, 503, 504)
}


def schema_of(model: type[BaseModel]) -> Schema:
    """The schema of a model by itself, fit for any place in the document."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    resolved: Schema = resolve(schema, definitions)
    return resolved


def resolve(node: Any, definitions: Schema) -> Any:
    """Put in place of each reference what it stands for."""
    if isinstance(node, list):
        return [resolve(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return resolve(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {name: resolve(value, definitions) for name, value in node.items()}


def form_schema() -> Schema:
    """The schema of a form: the fields of JSON without null, which a form can't say, and the files."""
    schema = schema_of(ImageRequest)
    fields = {}
    for name, field in schema["properties"].items():
        alternatives = [kind for kind in field.pop("anyOf", [field]) if kind.get("type") != "null"]
        field.pop("default", None)
        if alternatives:
            fields[name] = {**field, **alternatives[0]}
    files = {"type": "array", "maxItems": MAX_IMAGES, "items": {"type": "string", "format": "binary"}}
    images = {"image": files, "image[]": files}
    at_least_one = [{"required": [name]} for name in images]
    return {**schema, "properties": {**images, **fields}, "anyOf": at_least_one}


def request_body(**schemas: Schema) -> Schema:
    """A body that the route reads itself, by the kind of its content: `json` or `form`."""
    media_types = {"json": "application/json", "form": "multipart/form-data"}
    content = {media_types[kind]: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def event_stream(*events: Schema) -> Schema:
    """A stream of events, each of the given shapes."""
    return {
        "text/event-stream": {
            "schema": {"type": "string", "description": "Server-sent events; comment lines keep the connection alive."},
            "itemSchema": {"oneOf": list(events)},
        }
    }


def data_event(data: Schema) -> Schema:
    """An event without a name."""
    content = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {"type": "object", "required": ["data"], "properties": {"data": content}}


def named_event(data: Schema) -> Schema:
    """An event whose name is also the `type` in its data."""
    names = {key: value for key, value in data["properties"]["type"].items() if key in ("enum", "const")}
    event = data_event(data)
    return {**event, "required": ["event", "data"], "properties": {"event": names, **event["properties"]}}


def error_event() -> Schema:
    properties = {"type": {"const": "error"}, "error": schema_of(ErrorDetail)}
    return named_event({"type": "object", "required": ["type", "error"], "properties": properties})


def image_responses() -> dict[int | str, Schema]:
    """What an endpoint for pictures answers, besides its plain JSON and its errors."""
    events = [named_event(schema_of(model)) for model in (PartialImageEvent, CompletedEvent, ProgressEvent)]
    stream = event_stream(*events, error_event())
    files = {f"image/{kind}": {"schema": {"type": "string", "format": "binary"}} for kind in get_args(OutputFormat)}
    description = "The pictures: at once, as events with `stream`, or a single one as it is for `Accept: image/*`."
    return {
        200: {"description": description, "content": {**stream, **files}},
        202: {"model": RequestState, "description": "With `background_job`: where its answer will be."},
        409: {"model": ErrorBody, "description": "There is a background job of this request's id already."},
    }
