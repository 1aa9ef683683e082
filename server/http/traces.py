"""OpenTelemetry: one span for each request that computes, under vLLM's names, sent by OTLP over HTTP.

The middleware is there with --otlp-traces-endpoint only; without it nothing of OpenTelemetry is imported.
No text of a request or an answer is in a span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.middleware import on_head
from server.requests.timing import RequestTimes

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Attributes = Mapping[str, str | int | float | None]
"""Names and values; None if nothing is known."""

_CONTEXT = ("traceparent", "tracestate")
"""The headers by which W3C Trace Context says which span a request belongs to."""


class Described(Protocol):
    """The work of a request, which its route has put into the scope as `work`."""

    def describe(self) -> Attributes: ...


def make_tracer(endpoint: str) -> Tracer:
    """A tracer that sends spans from a thread of its own, and what is left when the process ends.

    The service's name and more of the resource come from OpenTelemetry's own variables, such as
    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, and so do headers for the collector.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "facet"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return provider.get_tracer("facet")


class Traces:
    """Makes the span of each request that had work for the engine, when its answer has ended."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracer
        self._kind, self._error = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._extract = TraceContextTextMapPropagator().extract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.time_ns(), 500

        def note_status(head: Message) -> None:
            nonlocal status
            status = head["status"]

        try:
            await self._app(scope, receive, on_head(send, note_status))
        finally:
            if "work" in scope:
                self._report(scope, began, status)

    def _report(self, scope: Scope, began: int, status: int) -> None:
        work, times = scope["work"], scope["times"]
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        context = self._extract({name: given[name] for name in _CONTEXT if name in given})
        span = self._tracer.start_span("llm_request", context, self._kind, start_time=began)
        described = {**work.describe(), **_latencies(times)}
        span.set_attributes({name: value for name, value in described.items() if value is not None})
        span.set_attribute("http.route", getattr(scope.get("route"), "path", ""))
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(self._error)
        span.end()


def _latencies(times: RequestTimes) -> Attributes:
    """The times of a request in seconds; those of the engine only if it has computed something."""
    whole = {"gen_ai.latency.e2e": time.monotonic() - times.started}
    if not times.steps:
        return whole
    return {
        **whole,
        "gen_ai.latency.time_to_first_token": times.first_token,
        "gen_ai.latency.time_in_queue": times.queued_time,
        "gen_ai.latency.time_in_model_prefill": times.prefill_time,
        "gen_ai.latency.time_in_model_decode": times.decode_time,
        "gen_ai.latency.time_in_model_inference": times.prefill_time + times.decode_time,
    }
