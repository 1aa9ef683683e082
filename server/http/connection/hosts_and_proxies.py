"""What the server reads in the head of a request before anything of the application runs: the client behind a
proxy, as X-Forwarded-For names it, and foreign hosts, web pages and bodies, which are refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Collection, Sequence
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.request_state import path_of, state_of
from server.errors import ApiError, BadRequest, HttpError
from server.http.connection import body_limits as bodies
from server.http.error_answers import error_response
from server.options.option_checks import is_loopback


class HostRules:
    """Refuses requests that name a foreign host or come from a foreign web page.

    A page on the web can send requests to a server on its visitor's machine, and read the answers if its own
    name is made to resolve to that machine. Such a request names a foreign host, or origin, or both.
    """

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
        self._last = b""
        """The host that was named last and is ours: nearly all requests name the same."""

    def refusal(self, host: bytes, origin: bytes | None) -> ApiError | None:
        """Why a request is refused that has these headers, if it is."""
        if origin is None and host == self._last:
            return None
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
        self._last = host
        return None

    def _answers_to(self, name: bytes) -> bool:
        # A number cannot be made to resolve to another machine, and probes of load balancers use numbers.
        return name in self._names or (self._takes_addresses and _is_address(name))

    def _is_ours(self, origin: bytes, host: bytes) -> bool:
        # The scheme is left out: behind a proxy that ends TLS it is not the one of this connection.
        return origin.partition(b"://")[2] == host or origin in self._origins


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


HOST = re.compile(rb"[^\s/\\?#@]+")


class HeaderChecks:
    """Refuses a request whose headers show that it is meant for another host, comes from a foreign web page,
    or announces a body that is not taken."""

    def __init__(self, app: ASGIApp, hosts: HostRules) -> None:
        self._app = app
        self._hosts = hosts

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is not None:
            # Closed, or the rest of the body would be read as the next request.
            return error_response(error, path_of(scope), close=True)(scope, receive, send)
        return self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value for name, value in raw if name == b"host"]
        if scope["http_version"] == "1.1" and (len(hosts) != 1 or not HOST.fullmatch(hosts[0])):
            return BadRequest("The request needs one header Host, with a host and perhaps a port.")
        headers = state_of(scope).head = dict(reversed(raw))  # of several with one name the first counts
        if hosts and (foreign := self._hosts.refusal(hosts[0], headers.get(b"origin"))):
            return foreign
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > bodies.MAX_BODY and path_of(scope) not in bodies.UPLOADS:
            most = bodies.most_bytes(scope["app"].state.frontend.media)
            if int(length) > most:
                return bodies.body_too_large(most)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            return HttpError(415, "Compressed bodies are not accepted: send the body as it is.")
        if length.isdigit() and not bodies.BODY_MEMORY.has_room(int(length)):
            return None if path_of(scope) in bodies.UPLOADS else bodies.no_room_for_body()
        return None


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_WITH_PORT = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([0-9.]{7,15}))(?::([0-9]{1,5}))?")
"""An IPv6 address in brackets, or one of IPv4, and perhaps a port."""


class TrustedProxies:
    """Puts the client's address into requests that a proxy passes on which is believed."""

    def __init__(self, trusted: str | Sequence[str]) -> None:
        """`trusted` are addresses and networks, also as one text with commas; "*" stands for everybody.

        Raises ValueError if one of them is neither.
        """
        parts = trusted.split(",") if isinstance(trusted, str) else trusted
        names = [name for part in parts if (name := part.strip())]
        self._everybody = "*" in names
        try:
            self._networks = [ipaddress.ip_network(name, strict=False) for name in names if name != "*"]
        except ValueError as error:
            raise ValueError(f"FORWARDED_ALLOW_IPS takes addresses and networks, or *: {error}") from None
        self.trusts = lru_cache(1024)(self._trusts)

    def _trusts(self, host: str | None) -> bool:
        """Whether the client at this address is such a proxy; None is a client without one."""
        if self._everybody or host is None:
            return self._everybody
        address = _read_address(host)
        return address is not None and self._holds(address)

    def _holds(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def identify(self, scope: Scope) -> None:
        """Write the client and its scheme into a proxy's request. Without an address the proxy's stays."""
        forwarded: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"x-forwarded-for":
                forwarded.append(value)
            elif name == b"x-forwarded-proto" and value in (b"http", b"https"):
                scope["scheme"] = value.decode()
        if forwarded and (client := self._client(b",".join(forwarded).decode("latin-1"))) is not None:
            scope["client"] = client

    def _client(self, forwarded: str) -> tuple[str, int] | None:
        """The last address that is no proxy's, because each proxy adds at the end who has asked it; anybody
        may have written what stands before."""
        parts = forwarded.split(",")
        found: tuple[str, int] | None = None
        for part in parts[:1] if self._everybody else reversed(parts):
            text = part.strip()
            with_port = _WITH_PORT.fullmatch(text)
            host, port = (with_port[1] or with_port[2], int(with_port[3] or 0)) if with_port else (text, 0)
            address = _read_address(host)
            if address is None:
                return None
            found = str(address), port
            if not self._holds(address):
                break
        return found


def _read_address(host: str) -> Address | None:
    """The address that a text is; None if it is none, or has a zone, which may be any text."""
    try:
        return None if "%" in host else ipaddress.ip_address(host)
    except ValueError:
        return None
