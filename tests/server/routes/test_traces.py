"""Spans as a collector gets them by OTLP over HTTP, and that nothing is imported where nobody wants them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import Any

import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend

from engine_core.engine_stats import Timing
from server.options.option_checks import check_traces
from server.options.option_parsing import OptionError
from server.options.server_flags import ReportOptions

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.slow(2)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A collector of spans at a free port of this machine."""

    def __init__(self) -> None:
        self._bodies: Queue[bytes] = Queue()
        bodies = self._bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.put(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def next_spans(self) -> list[Any]:
        """The spans of the next message, each with its service's name."""
        message = ExportTraceServiceRequest.FromString(self._bodies.get(timeout=60))
        return [
            (span, {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"])
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    collector = Collector()
    yield collector
    collector.stop()


def attributes(span: Any) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def test_a_request_has_a_span_with_vllms_names_below_that_of_its_client(
    frontend: FakeFrontend, collector: Collector
) -> None:
    frontend.timing = Timing(queued=0.25, prefill=0.125, decode=0.0625, preemptions=0, steps=3, compute=0.5)
    app = make_app(frontend, reports=ReportOptions(otlp_traces_endpoint=collector.endpoint))
    body = {"prompt": "hi", "max_tokens": 20, "temperature": 0.5, "stream": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    async with make_client(app) as client:
        assert (await client.get("/v1/models")).status_code == 200
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
    [(span, service)] = collector.next_spans()
    assert (span.name, service) == ("llm_request", "facet")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.trace_state == "vendor=1"
    assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    told = attributes(span)
    assert str(told.pop("gen_ai.request.id")).startswith("cmpl-")
    assert float(str(told.pop("gen_ai.latency.e2e"))) > 0
    assert float(str(told.pop("gen_ai.latency.time_to_first_token"))) >= 0.375
    assert told.pop("gen_ai.usage.prompt_tokens") == 3
    assert int(str(told.pop("gen_ai.usage.completion_tokens"))) > 0
    assert told == {
        "gen_ai.response.model": "org/tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.125,
        "gen_ai.latency.time_in_model_decode": 0.0625,
        "gen_ai.latency.time_in_model_inference": 0.1875,
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }


async def test_texts_that_are_pooled_have_spans_too(
    frontend: FakeFrontend, embedder: None, collector: Collector
) -> None:
    frontend.serve("embed")
    app = make_app(frontend, reports=ReportOptions(otlp_traces_endpoint=collector.endpoint))
    async with make_client(app) as client:
        assert (await client.post("/v1/embeddings", json={"input": ["a", "bc"]})).status_code == 200
    [(span, _)] = collector.next_spans()
    told = attributes(span)
    assert str(told["gen_ai.request.id"]).startswith("embd-")
    assert told["gen_ai.usage.prompt_tokens"] > 0 and not span.parent_span_id


def test_nothing_of_it_is_imported_without_the_flag() -> None:
    code = "import sys, server.run.app; sys.exit(any(m.startswith('opentelemetry.sdk') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_an_address_of_grpc_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="4318, not 4317"):
        check_traces("localhost:4317")
    with pytest.raises(OptionError, match="4318/v1/traces"):
        check_traces("http://collector:4317")
    monkeypatch.setattr("server.options.option_checks.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install opentelemetry-sdk"):
        check_traces("http://localhost:4318/v1/traces")
    check_traces(None)
