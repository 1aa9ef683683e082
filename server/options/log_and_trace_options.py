"""Options on what the server writes into its log, its answers and traces about requests."""

from __future__ import annotations

from typing import Annotated

import msgspec

from worker import logs
from worker.options import Doc

LOGS = "Process and logs"
REPORTS = "Times and traces"


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    enable_log_requests: Annotated[bool, Doc(LOGS, "Log each request's id, size and parameters.")] = False
    disable_log_stats: Annotated[bool, Doc(LOGS, "No line on throughput every ten seconds.")] = False
    disable_uvicorn_access_log: Annotated[bool, Doc(LOGS, "No line for each HTTP request.")] = False
    disable_access_log_for_endpoints: Annotated[
        str, Doc(LOGS, "Paths whose requests have no such line, divided by commas: /health,/metrics.")
    ] = ""
    uvicorn_log_level: Annotated[
        str,
        Doc(LOGS, "What to log.", ("critical", "error", "warning", "info", "debug")),
    ] = "info"
    log_format: Annotated[
        str, Doc(LOGS, "Lines of the log: text for people, json for programs.", ("text", "json"))
    ] = "text"

    @property
    def style(self) -> str:
        """What `worker.logs.setup` is told in every process."""
        return logs.style(self.uvicorn_log_level, self.log_format)

    @property
    def quiet_paths(self) -> frozenset[str]:
        """Paths whose requests are not logged."""
        parts = (part.strip() for part in self.disable_access_log_for_endpoints.split(","))
        return frozenset(part for part in parts if part)


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
