"""Fetches media from addresses that clients name, and from no address that only this server can reach.

The addresses of a name are checked, and one of those is dialled, while the Host header, TLS's server name and
the certificate keep the name. Each redirect is checked as the first URL was.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import httptools

from server.errors import BadRequest, Unprocessable

MOST_REDIRECTS = 5
MOST_AT_ONCE = 32
"""Fetches at one time; others wait, within their own seconds."""
_MOST_HEAD = 64 << 10
_PIECE = 64 << 10
_CONNECT_SECONDS = 5.0
_REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"[a-z0-9._:-]+")
_UNESCAPED = "/%:?&=#+!$,;'@()*[]~"
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""Addresses through which some networks reach those of IPv4, which are their last 32 bits."""

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def host_name(host: str) -> str:
    """A host's name as it is looked up: in lower case, and in ASCII. Raises ValueError if it is none."""
    return host.lower().encode("idna").decode("ascii")


def is_public(address: str) -> bool:
    """Whether anybody on the internet can reach an address."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip.is_site_local:
            return False
        if ip in _TRANSLATED:
            return is_public(str(ip_address(int(ip) & 0xFFFF_FFFF)))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class Fetcher:
    """Fetches by GET over HTTP/1.1, within bounds of bytes and seconds."""

    def __init__(
        self,
        domains: frozenset[str] | None,
        most_bytes: int,
        seconds: float,
        *,
        resolve: Resolve = look_up,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`domains`: the only hosts to fetch from, at any address; None allows all hosts at public ones."""
        self._domains, self._most_bytes, self._seconds = domains, most_bytes, seconds
        self._resolve, self._tls = resolve, tls
        self._free = asyncio.Semaphore(MOST_AT_ONCE)

    async def fetch(self, url: str) -> bytearray:
        """The body behind a URL. Raises an error for the client if there is none, or if it is not allowed."""
        try:
            async with asyncio.timeout(self._seconds), self._free:
                for _ in range(MOST_REDIRECTS + 1):
                    answer = await self._get(_split(url))
                    if answer.status not in _REDIRECTS:
                        return answer.body
                    url = urljoin(url, answer.headers.get(b"location", b"").decode("utf-8", "replace"))
        except TimeoutError:
            raise Unprocessable(
                f"A media URL was not fetched within {self._seconds:g} s (--media-seconds)."
            ) from None
        except (OSError, ValueError, httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise Unprocessable("A media URL's server is not reached, or broke off its answer.") from None
        raise Unprocessable(f"A media URL redirects more than {MOST_REDIRECTS} times.")

    async def _get(self, place: _Place) -> _Answer:
        reader, writer = await self._connect(place)
        try:
            writer.write(place.request())
            answer = _Answer(self._most_bytes)
            while not answer.is_done and (data := await reader.read(_PIECE)):
                answer.feed(data)
            if answer.is_cut():
                raise ConnectionError
            return answer
        finally:
            writer.transport.abort()

    async def _connect(self, place: _Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._domains is not None and place.host not in self._domains:
            raise BadRequest("A media URL's host is not one of those that --allowed-media-domains names.")
        addresses = await self._resolve(place.host, place.port)
        if self._domains is None and not (addresses := list(filter(is_public, addresses))):
            raise BadRequest(
                "A media URL's host has no public address. The operator can allow it by name with "
                "--allowed-media-domains."
            )
        if place.is_tls and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)  # reads all certificates
        tls = {"ssl": self._tls, "server_hostname": place.host} if place.is_tls else {}
        for address in addresses[:-1]:
            with suppress(OSError):
                async with asyncio.timeout(_CONNECT_SECONDS):
                    return await asyncio.open_connection(address, place.port, **tls)
        return await asyncio.open_connection(addresses[-1], place.port, **tls)


class _Place(NamedTuple):
    """The parts of a URL that a request needs."""

    is_tls: bool
    host: str
    port: int
    target: str

    def request(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != (443 if self.is_tls else 80):
            host = f"{host}:{self.port}"
        head = f"GET {self.target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: facet\r\nAccept: */*\r\n"
        return f"{head}Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")


def _split(url: str) -> _Place:
    with suppress(ValueError):
        parts = urlsplit(url)
        host = host_name(parts.hostname or "")
        if parts.scheme in ("http", "https") and _HOST.fullmatch(host) and parts.username is None:
            target = quote(parts.path or "/", _UNESCAPED)
            target += f"?{quote(parts.query, _UNESCAPED)}" if parts.query else ""
            is_tls = parts.scheme == "https"
            return _Place(is_tls, host, parts.port or (443 if is_tls else 80), target)
    raise BadRequest("A media URL must be http(s)://host/path, with a valid host and without a user's name.")


class _Answer:
    """A response, as httptools reads it."""

    def __init__(self, most_bytes: int) -> None:
        self.status = 0
        """The status, once all headers are there."""
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.is_done = False
        """Whether no more needs to be read."""
        self._most_bytes = most_bytes
        self._head = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._head += 0 if self.status else len(data)
        self._parser.feed_data(data)
        if len(self.body) > self._most_bytes or self._head > _MOST_HEAD + _PIECE:
            raise Unprocessable(
                f"A media URL's file has more than the {self._most_bytes} bytes allowed (--max-media-mb)."
            )
        if self.status and not 200 <= self.status < 300 and self.status not in _REDIRECTS:
            raise Unprocessable(f"A media URL is answered with status {self.status}.")

    def is_cut(self) -> bool:
        """Whether the connection has ended before the answer."""
        has_end = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        return not self.is_done and (has_end or not self.status)

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # sent ahead of the answer
            self.headers.clear()
        else:
            self.status, self.is_done = status, status in _REDIRECTS

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_done = self.status != 0
