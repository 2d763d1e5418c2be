"""OpenTelemetry spans of a request's stages, for those who ask for them: without an endpoint nothing is imported.

A request is one span, a child of the client's where its `traceparent` says so. The stages come from the timings of its
answer, once it is there: the device works on many requests in turn, so a stage is shown with its length, laid end to
end behind the one before it, not with each moment in which it ran.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.request import Timings

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

DRAWN_PATHS = frozenset({"/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"})


def record_stages(tracer: Tracer, timings: Timings, file_s: float) -> None:
    """Spans under the current one, which is the request's, that end now."""
    stages = {
        "queue wait": timings.queue_s,
        "encode": timings.encode_s,
        "prefill": timings.prefill_s,
        "steps": timings.steps_s,
        "decode": timings.decode_s,
        "file encode": file_s,
    }
    at_ns = time.time_ns() - int(sum(stages.values()) * 1e9)
    for name, seconds in stages.items():
        span = tracer.start_span(name, start_time=at_ns)
        at_ns += int(seconds * 1e9)
        span.end(end_time=at_ns)


class RequestSpans:
    """A span around each request for pictures, from its arrival to the last byte of its answer."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app, self.tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in DRAWN_PATHS:
            await self.app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        with self.tracer.start_as_current_span(scope["path"], parent, kind=SpanKind.SERVER) as span:
            span.set_attribute("easel.request_id", scope["state"]["request_id"])
            await self.app(scope, receive, send)


def exporting_tracer(endpoint: str) -> Tracer:
    """A tracer that sends to `endpoint`, the root of a collector that speaks OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "easel"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    return provider.get_tracer("easel")
