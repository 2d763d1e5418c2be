"""Spans of a request's stages, by the SDK's own exporter; and that nobody pays for them unasked."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.main import create_app
from app.settings import Settings, load_settings
from tests.app.conftest import running

URL = "/v1/images/generations"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["queue wait", "encode", "prefill", "steps", "decode", "file encode"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "order"),
    [(URL, {"prompt": "canary"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "canary"}]})],
    ids=["images", "chat"],
)
async def test_a_request_and_its_stages_join_the_clients_trace(engine, url, order, stream):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    async with running(create_app(Settings(), engine, tracer=provider.get_tracer("test"))) as client:
        response = await client.post(url, json={**order, "stream": stream}, headers=headers)
        await client.get("/health/live")
    assert response.status_code == 200
    spans = exporter.get_finished_spans()
    *stages, request = spans
    assert [span.name for span in stages] == STAGES
    assert request.name == url and format(request.parent.span_id, "016x") == PARENT
    assert {format(span.context.trace_id, "032x") for span in spans} == {TRACE}
    assert all(span.parent.span_id == request.context.span_id for span in stages)
    lengths_s = [(span.end_time - span.start_time) / 1e9 for span in stages]
    assert lengths_s[:5] == pytest.approx([0.5, 0.25, 0.125, 2.0, 1.0], abs=1e-6)
    assert request.attributes == {"easel.request_id": "mine"}
    assert "canary" not in str([span.to_json() for span in spans])


def test_the_standard_variable_asks_for_it(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert load_settings().otlp_endpoint == "http://collector:4318"
    assert load_settings(otlp_endpoint="http://other").otlp_endpoint == "http://other"


def test_nothing_is_imported_unasked():
    code = "import sys; from app.main import create_app; from app.launch import make_engine; "
    code += "from app.settings import Settings; create_app(Settings(), make_engine(Settings())); "
    code += "sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
