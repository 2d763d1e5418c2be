"""Every failure as OpenAI's error envelope, and the one place that maps the engine's errors to HTTP.

Messages never repeat what the client sent: only the name of the field, made printable and cut short. So no answer
grows with its request, and nothing that a prompt or a file holds can come back through an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import (
    DeadlineExceeded,
    EngineError,
    EngineStopped,
    GenerationFailed,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestCancelled,
)

MAX_MESSAGE_CHARS = 600
MAX_PARAM_CHARS = 64
CLIENT_CLOSED_REQUEST = 499
MAX_RETRY_AFTER_S = 60.0  # the SDK gives up at once if told of over 120 s; its older versions heed no more than this
NO_RETRY = {"x-should-retry": "false"}  # else the SDK runs the same failing job three times

FIELD_NAMES = {  # the engine's names of what the client calls otherwise
    "condition_images": "image",
    "num_images": "n",
    "num_steps": "num_inference_steps",
    "resolution_px": "resolution",
    "size_px": "size",
}


class ErrorDetail(BaseModel):
    """What went wrong; `param` is the offending field, where there is one."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """OpenAI's envelope."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than success, in the client's terms."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        error_type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        param = printable(param) if param is not None else None
        self.detail = ErrorDetail(message=message[:MAX_MESSAGE_CHARS], type=error_type, param=param, code=code)

    def response(self) -> JSONResponse:
        return JSONResponse(ErrorBody(error=self.detail).model_dump(), self.status, self.headers)


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def payload_too_large(message: str, *, param: str | None = None) -> ApiError:
    return ApiError(413, message, param=param, code="payload_too_large")


def too_many_bodies(retry_after_s: float) -> ApiError:
    message = "Other requests fill the memory that bodies may have."
    headers = retry_after(retry_after_s)
    return ApiError(429, message, error_type="rate_limit_error", code="too_many_bodies", headers=headers)


def too_slow(what: str) -> ApiError:
    return ApiError(408, f"{what} did not arrive in time.", code="request_timeout", headers={"connection": "close"})


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def internal_error() -> ApiError:
    return ApiError(500, "The server had an internal error.", error_type="server_error", code="internal_error")


def printable(name: str) -> str:
    """A field name that is safe to repeat."""
    return re.sub(r"[^\x20-\x7e]", "?", name[:MAX_PARAM_CHARS])


def from_validation(error: ValidationError | RequestValidationError, *, param: str | None = None) -> ApiError:
    """The first fault of a body, without the value that caused it. `param` is where the client knows it from."""
    fault = error.errors()[0]
    kind, message = fault["type"], fault["msg"]
    if fault["loc"]:
        param = param or printable(str(fault["loc"][0]))
    if kind == "json_invalid":
        return invalid(f"{message}.", code="invalid_json")
    if param is None:
        return invalid("The body must be a JSON object.", code="invalid_type")
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        where = f" in '{param}'" if len(fault["loc"]) > 1 else ""
        name = printable(str(fault["loc"][-1]))
        return invalid(f"Unknown parameter: '{name}'{where}.", param=param, code="unknown_parameter")
    code = {"unsupported_parameter": kind}.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return invalid(f"Invalid '{param}': {message}.", param=param, code=code)


def from_engine(error: EngineError) -> ApiError:
    """HTTP for what the engine raises."""
    match error:
        case InvalidRequest():
            return invalid(error.message, param=FIELD_NAMES.get(error.param, error.param), code=error.code)
        case QueueFull():
            headers = retry_after(error.retry_after_s)
            return ApiError(429, error.message, error_type="rate_limit_error", code="queue_full", headers=headers)
        case NotReady():
            headers = retry_after(error.retry_after_s)
            return ApiError(503, error.message, error_type="server_error", code="not_ready", headers=headers)
        case EngineStopped():
            return ApiError(503, error.message, error_type="server_error", code="stopped", headers=retry_after(1.0))
        case DeadlineExceeded():
            code = "deadline_exceeded"
            return ApiError(504, error.message, error_type="server_error", code=code, headers=NO_RETRY)
        case RequestCancelled():
            status, code = CLIENT_CLOSED_REQUEST, "request_cancelled"
            return ApiError(status, error.message, error_type="request_cancelled", code=code, headers=NO_RETRY)
        case GenerationFailed():
            return ApiError(500, error.message, error_type="server_error", code=error.code, headers=NO_RETRY)
        case _:
            return internal_error()


def retry_after(seconds: float) -> dict[str, str]:
    """The standard header in whole seconds, and the finer one that the SDK prefers; at most a minute in both."""
    seconds = min(seconds, MAX_RETRY_AFTER_S)
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}


def from_http(error: HTTPException) -> ApiError:
    """The framework's own refusals, 404 and 405 in the main."""
    status = HTTPStatus(error.status_code)
    message = {
        404: "There is no such route.",
        405: "This route does not take this method.",
    }.get(status, f"{status.phrase}.")
    code = "route_not_found" if status == HTTPStatus.NOT_FOUND else status.name.lower()
    return ApiError(status, message, code=code, headers=error.headers)


def install_handlers(app: FastAPI) -> None:
    """Make `app` answer every exception that is expected. The others end in `app.middleware.UnforeseenErrors`."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(EngineError)
    async def on_engine_error(request: Request, error: EngineError) -> Response:
        return from_engine(error).response()

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        return from_http(error).response()

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error).response()

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # for the log: nobody reads it
