"""Who sends a request: the owner of its share of the server, and what it may do."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from starlette.requests import Request
from starlette.types import Scope

from engine_core.client.in_flight import AddOptions
from server.access.keys.key_file import Key, Right
from server.access.quotas import Account

_PROXIES = ("127.0.0.1", "::1")
"""Addresses whose X-Forwarded-For uvicorn believes."""
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


def caller_of(request: Request) -> Caller:
    """The client that sends a request: the holder of its key, or else the address at the other end."""
    scope = request.scope
    caller = scope.get("caller")
    if caller is None:
        by_address = scope["app"].state.config.access.fair_between == "addresses"
        client = scope.get("client") if by_address else None
        # All clients of a Unix socket are one.
        caller = scope["caller"] = ANYONE if client is None else _caller_at(client[0])
    return caller


def caller_at(scope: Scope, *, by_address: bool) -> Caller | None:
    """The client at the other end of a connection; None if it may be a proxy that names another one."""
    client = scope.get("client") if by_address else None
    if client is None:
        return ANYONE
    if client[0] in _PROXIES and any(name == b"x-forwarded-for" for name, _ in scope["headers"]):
        return None
    return _caller_at(client[0])


def require_right(request: Request, *rights: Right) -> None:
    """Raises Forbidden if the client's key may be used for none of these."""
    caller: Caller | None = request.scope.get("caller")
    if caller is not None and caller.key is not None:
        caller.key.require(*rights)


def begin_request(request: Request) -> None:
    """Count a request against the quotas of the client's key; raises QuotaExceeded if they are used up."""
    caller: Caller | None = request.scope.get("caller")
    if caller is not None and caller.account is not None:
        caller.account.begin_request()


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
