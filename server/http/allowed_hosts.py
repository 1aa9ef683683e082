"""The names that this server answers to, and the web pages that may call it.

A page on the web can send requests to a server on its visitor's machine, and read the answers if its own name
is made to resolve to that machine. Such a request names a foreign host, or a foreign origin, or both.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from server.errors import ApiError, HttpError


class HostRules:
    """Refuses requests that name a foreign host or come from a foreign web page."""

    def __init__(
        self, address: str | None, *, allowed_hosts: Collection[str], allowed_origins: Collection[str]
    ) -> None:
        """`address` is the one that is listened to; None if it is a Unix socket."""
        self._takes_addresses = address is None or not is_loopback(address)
        self._any_host = "*" in allowed_hosts or (self._takes_addresses and not allowed_hosts)
        names = {"localhost", *allowed_hosts}
        if address is not None and not self._takes_addresses:
            names |= _names_of(address)
        self._names = {name.lower().encode() for name in names}
        self._origins = {origin.lower().encode() for origin in allowed_origins}
        self._any_origin = "*" in allowed_origins

    def refusal(self, host: bytes, origin: bytes | None) -> ApiError | None:
        """Why a request is refused that has these headers, if it is."""
        if not (self._any_host or self._answers_to(_without_port(host.lower()))):
            name = _without_port(host).decode("latin-1")
            return HttpError(
                421,
                f"This server does not answer to the name {name!r}. Use localhost or its address, or start "
                "it with --allowed-hosts NAME.",
            )
        if origin is not None and not (self._any_origin or self._is_ours(origin.lower(), host.lower())):
            return HttpError(
                403,
                "Web pages of other origins may not call this server. Start it with --allowed-origins ORIGIN "
                "to let them.",
            )
        return None

    def _answers_to(self, name: bytes) -> bool:
        # A number cannot be made to resolve to another machine, and probes of load balancers use numbers.
        return name in self._names or (self._takes_addresses and _is_address(name))

    def _is_ours(self, origin: bytes, host: bytes) -> bool:
        # The scheme is left out: behind a proxy that ends TLS it is not the one of this connection.
        return origin.partition(b"://")[2] == host or origin in self._origins


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address that is listened to."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _names_of(address: str) -> set[str]:
    if address.lower() == "localhost":
        return {"127.0.0.1", "[::1]"}
    return {f"[{address}]" if ":" in address else address}


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return (name if colon and port.isdigit() else host).removesuffix(b".")


def _is_address(name: bytes) -> bool:
    try:
        ipaddress.ip_address(name.strip(b"[]").decode("latin-1"))
    except ValueError:
        return False
    return True
