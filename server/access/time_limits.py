"""How long a request may wait and take: what the operator allows and the client asks for, the least of it."""

from __future__ import annotations

import re
import time
from math import inf
from typing import NamedTuple

from starlette.requests import Request

from engine_core.client.in_flight import AddOptions
from server.errors import BadRequest, DeadlineExceeded, TooLate
from server.options.server_config import AccessOptions

HEADER = b"x-request-timeout"
MOST_SECONDS = 1e6
RETRY_SECONDS = 5
"""Seconds after which a client may try again whose time was over before the engine was asked."""

_NUMBER = re.compile(rb"[0-9]{1,8}(\.[0-9]{1,9})?")


class TimeLimits(NamedTuple):
    """Times on the monotonic clock, which never leave this process: engines are told durations."""

    begins: float
    """When the engine must have begun with the request."""
    ends: float
    """When the request must be answered."""

    def add_to(self, options: AddOptions, *, begun: bool = False) -> None:
        """Tell the engine what is left of the time. Raises TooLate if nothing is."""
        now = time.monotonic()
        if now >= self.ends and begun:
            raise DeadlineExceeded("The request has taken longer than it may.")
        if now >= self.ends or (now >= self.begins and not begun):
            raise TooLate("The request has waited for longer than it may.", retry_after=RETRY_SECONDS)
        if self.ends < inf:
            options["budget"] = self.ends - now
        if self.begins < inf and not begun:
            options["wait"] = self.begins - now


def limits_of(
    request: Request, options: AccessOptions, arrived: float, asked: float | None
) -> TimeLimits | None:
    """The limits of a request that arrived at this time; None if it has none. `asked` is its body's."""
    seconds = options.request_timeout or inf
    for name, value in request.scope["headers"]:
        if name == HEADER:
            seconds = min(seconds, _seconds(value))
    if asked is not None:
        seconds = min(seconds, asked)
    if seconds == inf and not options.max_queue_wait:
        return None
    return TimeLimits(arrived + (options.max_queue_wait or inf), arrived + seconds)


def _seconds(value: bytes) -> float:
    if not _NUMBER.fullmatch(value) or not 0 < (seconds := float(value)) <= MOST_SECONDS:
        shown = value[:20].decode("latin-1")
        raise BadRequest(
            f"X-Request-Timeout: {shown!r} is no number of seconds above 0 and up to {MOST_SECONDS:.0f}.",
            "X-Request-Timeout",
        )
    return seconds


def of_later_texts(options: AddOptions, seconds: float) -> AddOptions:
    """The options of texts that are sent so long after the first ones of their request."""
    if "wait" not in options and "budget" not in options:
        return options
    later = options.copy()
    later.pop("wait", None)
    if "budget" in later:
        later["budget"] -= seconds
        if later["budget"] <= 0:
            raise DeadlineExceeded("The request has taken longer than it may.")
    return later
