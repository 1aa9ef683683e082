"""Options on what answers and traces tell of the way of each request."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import msgspec

from server.options.reader import OptionError
from worker.options import Doc

REPORTS = "Times and traces"


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True):
    enable_timing: Annotated[
        bool, Doc(REPORTS, "Report in usage where the time went, in streams with the last chunk.")
    ] = False
    enable_timing_headers: Annotated[
        bool,
        Doc(
            REPORTS,
            "Tell in headers of whole answers how long they were queued, read and generated, and how many "
            "prompt tokens were cached: x-facet-queue-ms, -prefill-ms, -decode-ms, -cached-tokens.",
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Doc(
            REPORTS,
            "Where a span of each request is sent, by OTLP over HTTP: the whole URL, such as "
            "http://localhost:4318/v1/traces. Needs the extra otel.",
        ),
    ] = None


def check_traces(reports: ReportOptions) -> None:
    """Raises OptionError if spans cannot be sent to where they shall be."""
    endpoint = reports.otlp_traces_endpoint
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise OptionError(
            f"--otlp-traces-endpoint: {endpoint!r} is no http or https URL; spans are sent by OTLP over "
            "HTTP, whose port is 4318, not 4317, that of gRPC"
        )
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.sdk") is None:
        raise OptionError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'facet-serve[otel]'")
