"""What all connections of a process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.errors import ApiError
from server.http.connection import connection_limits as limits
from server.http.connection.deadline_timer import DeadlineTimer
from server.http.connection.hosts_and_proxies import TrustedProxies
from server.http.connection.refusal_log import RefusalLog
from server.http.middleware import AccessLog


@dataclass(frozen=True)
class Shared:
    """The limits, timers and handlers that all connections of a process share."""

    most: int
    """Connections that are served at a time."""
    timer: DeadlineTimer
    log: RefusalLog
    on_refusal: Callable[[int], None]
    """A function that is told the status of each refusal."""
    access_log: AccessLog = field(default_factory=AccessLog)
    check_head: Callable[[bytes, bytes, Any], ApiError | None] = lambda method, target, scope: None
    """A function of a request's method, target and scope. It tells why it is refused, if it is."""
    below_root: Callable[[bytes], bytes] = lambda target: target
    """A function that takes the prefix of `--root-path` from a target, where the proxy has left it."""
    proxies: TrustedProxies = field(default_factory=lambda: TrustedProxies("127.0.0.1,::1"))
    max_head: int = limits.MAX_HEAD
    """Bytes of a request's first line and headers together."""
    max_headers: int = limits.MAX_HEADERS
    keep_alive: float = field(default_factory=lambda: limits.KEEP_ALIVE_SECONDS)
    """Seconds from an answer to the next request."""
    reserved: dict[Any, None] = field(default_factory=dict)
    """The connections beyond the most that may ask for PROBE_PATHS, the oldest first."""
