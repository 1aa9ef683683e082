"""The client behind a proxy, as X-Forwarded-For names it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.types import Scope

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

    def trusts(self, host: str | None) -> bool:
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
