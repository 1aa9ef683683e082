"""Tells who sends a request: its owner, its rights and its deadlines."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from starlette.types import Scope

from engine_core.client.in_flight import AddOptions
from server.access.key_file import Key
from server.access.quotas import Account
from server.errors import BadRequest, DeadlineExceeded, TooLate
from server.options.server_flags import AccessOptions

_NETWORK = 64
"""The leading bits of an IPv6 address that name a client: one may have all addresses behind them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, and its rights."""

    owner: str = ""
    """The name under which all its requests share one part of the server."""
    weight: float = 1.0
    """Its part, in proportion to those of others."""
    max_running: int = 0
    """The answers and texts that an engine computes for it at a time, if not 0."""
    max_queued: int | None = None
    """The answers and texts that may wait, if not None."""
    key: Key | None = None
    """Its key, if that is one of a file: it says what the client may do."""
    account: Account | None = None
    """What was used with that key."""

    @property
    def key_name(self) -> str:
        """The name of its key, to which belongs what the server keeps for it; empty if that has none."""
        return "" if self.key is None else self.key.name

    def for_model(self, names: Collection[str]) -> Caller | None:
        """This client, with its quotas for the model of these names; None if its key is for others."""
        own = "" if self.key is None else self.key.own_name(names)
        if own is None or self.account is None:
            return None if own is None else self
        return replace(self, account=self.account.for_model(own)) if own else self

    def add_options(self, priority: int, salt: str) -> AddOptions:
        """The options by which the engine treats a request as one of this client."""
        options: AddOptions = {"priority": priority, "owner": self.owner, "weight": self.weight, "salt": salt}
        if self.key is not None:
            options["priority"] = max(priority, self.key.priority)
            options["salt"] = self.key.salted(salt)
            if self.max_running:
                options["max_running"] = self.max_running
        return options


ANYONE = Caller()
"""The caller of a program that uses the engine directly, and of all clients that are not told apart."""


def caller_at(scope: Scope, *, by_address: bool) -> Caller:
    """The client at the other end of a connection. All clients of a Unix socket are one."""
    client = scope.get("client") if by_address else None
    return ANYONE if client is None else _caller_at(client[0])


@lru_cache(maxsize=1024)
def _caller_at(host: str) -> Caller:
    return Caller(_network_of(host))


def _network_of(host: str) -> str:
    """The address of an IPv4 client, or the network of an IPv6 client, which has many addresses."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _NETWORK), strict=False).network_address)


TIMEOUT = b"x-request-timeout"
"""The header that says how many seconds a request may take."""
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
            raise DeadlineExceeded("The request has exceeded its time limit.")
        if now >= self.ends or (now >= self.begins and not begun):
            raise TooLate(
                "The request has exceeded its time limit while it waited.", retry_after=RETRY_SECONDS
            )
        if self.ends < inf:
            options["budget"] = self.ends - now
        if self.begins < inf and not begun:
            options["wait"] = self.begins - now


def limits_of(
    named: bytes | None, options: AccessOptions, arrived: float, asked: float | None
) -> TimeLimits | None:
    """The limits of a request that arrived at this time; None if it has none. `named` is in its header, and
    `asked` in its body."""
    seconds = options.request_timeout or inf
    if named is not None:
        seconds = min(seconds, _seconds(named))
    if asked is not None:
        seconds = min(seconds, asked)
    if seconds == inf and not options.max_queue_wait:
        return None
    return TimeLimits(arrived + (options.max_queue_wait or inf), arrived + seconds)


def _seconds(value: bytes) -> float:
    if not _NUMBER.fullmatch(value) or not 0 < (seconds := float(value)) <= MOST_SECONDS:
        shown = value[:20].decode("latin-1")
        raise BadRequest(
            f"X-Request-Timeout: {shown!r} is not a number of seconds above 0 and up to {MOST_SECONDS:.0f}.",
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
            raise DeadlineExceeded("The request has exceeded its time limit.")
    return later
