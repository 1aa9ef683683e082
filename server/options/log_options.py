"""Options on what the server writes into its log."""

from __future__ import annotations

from typing import Annotated

import msgspec

from worker import logs
from worker.options import Doc

LOGS = "Process and logs"


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
