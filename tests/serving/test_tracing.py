"""One span per request, under the caller's, with its times and its usage."""

import sys
import time
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hybrid_jax.engine.engine import Engine
from serving.async_engine import AsyncEngine
from serving.tracing import RequestTracer, otlp_provider
from tests.helpers.engine_checks import small_config
from tests.helpers.fake_runner import FULL, STATE, FakeRunner
from tests.helpers.http_server import HttpServer, LoopThread

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_is_a_span_of_the_callers_trace(loop_thread: LoopThread) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    runner = FakeRunner((FULL, STATE), (40, 4), small_config())
    served = AsyncEngine(Engine(runner, None), None, observers=(RequestTracer(provider, "toy"),))
    served.start()
    server = HttpServer(loop_thread, served, otlp_endpoint="http://127.0.0.1:1")
    began = time.time_ns()
    body: dict[str, Any] = {"prompt": [3, 4, 5], "max_tokens": 4, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).is_success
    runner.launch_error = MemoryError("out of memory")
    httpx.post(f"{server.url}/v1/completions", json=body)
    server.close()
    served.close()
    good, failed = exporter.get_finished_spans()
    assert good.parent is not None and good.context is not None
    assert good.start_time is not None and good.end_time is not None
    assert f"{good.parent.span_id:016x}" == SPAN
    assert f"{good.context.trace_id:032x}" == TRACE
    assert good.attributes is not None
    assert good.attributes["gen_ai.usage.input_tokens"] == 3
    assert good.attributes["gen_ai.usage.output_tokens"] == 4
    assert good.attributes["gen_ai.response.finish_reasons"] == ("length",)
    (first,) = good.events
    assert began <= good.start_time <= first.timestamp <= good.end_time <= time.time_ns()
    assert failed.parent is None
    assert [event.name for event in failed.events] == ["first token", "exception"]


def test_without_the_exporter_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ValueError, match="pip install .*opentelemetry-exporter-otlp-proto-http"):
        otlp_provider("http://127.0.0.1:1")
