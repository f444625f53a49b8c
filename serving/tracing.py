"""Optional OpenTelemetry traces: one span per request, under the caller's if it sent one."""

import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid_jax.engine.types import TokenEvent
from serving.async_engine import TokenStream

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def otlp_provider(endpoint: str) -> "TracerProvider":
    """Sends spans to `endpoint`, in batches. Raises ValueError if OpenTelemetry is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ValueError(
            f"otlp_endpoint needs {error.name}; pip install "
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "hybrid-jax"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


class RequestTracer:
    """An observer of `AsyncEngine` that makes a span of each request when it has ended."""

    def __init__(self, provider: "TracerProvider", model_name: str) -> None:
        self._tracer = provider.get_tracer("hybrid_jax")
        self._model_name = model_name

    def __call__(self, stream: TokenStream, event: TokenEvent, now: float) -> None:
        """Notes an event; the times of the stream are monotonic."""
        if event.usage is None:
            return
        offset = time.time() - now  # from monotonic to Unix time
        span = stream.context.run(
            self._tracer.start_span,
            f"generate {self._model_name}",
            start_time=_nanoseconds(stream.arrived + offset),
        )
        first = stream.first_token_at or now
        span.set_attributes(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.id": event.request_id,
                "gen_ai.response.finish_reasons": [event.finish_reason or ""],
                "gen_ai.usage.input_tokens": event.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": event.usage.completion_tokens,
                "hybrid_jax.cached_tokens": event.usage.cached_tokens,
            }
        )
        span.add_event("first token", timestamp=_nanoseconds(first + offset))
        if event.error is not None:
            span.record_exception(event.error)
        span.end(_nanoseconds(now + offset))


class CallerTrace:
    """Makes the caller's span, if its headers name one, the parent of what follows. Plain ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection as ASGI says."""
        from opentelemetry import context, propagate

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = context.attach(propagate.extract(dict(Headers(scope=scope))))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
