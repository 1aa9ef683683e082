"""Fetching of media, from a server on the loopback whose names a scripted resolver gives."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate

from server.errors import ApiError
from server.media import fetch
from server.media.fetch import Fetcher, host_name, is_public

HERE = frozenset({"here.example"})
HEAD = b"HTTP/1.1 200 OK\r\n"


class Site:
    """A server that gives each connection the next of its answers, and keeps what it was asked."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(self.answers.pop(0).replace(b"PORT", str(self.port).encode()))


@asynccontextmanager
async def serving(
    answer: Callable[..., Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    ends: list[asyncio.Future[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(end := asyncio.get_running_loop().create_future())
        await answer(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        end.set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*ends)


class Names:
    """A resolver; the addresses of later look-ups differ."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return [self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]]


def fetcher(*addresses: str, domains: frozenset[str] | None = HERE, **options: Any) -> Fetcher:
    given = {"most_bytes": 1000, "seconds": 5.0, **options}
    return Fetcher(domains, resolve=Names(*addresses or ("127.0.0.1",)), **given)


async def fetched(*answers: bytes, path: str = "x", **options: Any) -> tuple[bytes, Site]:
    site = Site(*answers)
    async with serving(site.answer) as site.port:
        url = f"http://here.example:{site.port}/{path}"
        return bytes(await fetcher(**options).fetch(url)), site


async def refused(coroutine: Awaitable[object], status: int, message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        await coroutine
    assert error.value.status == status


async def test_the_name_is_asked_for_at_the_address_that_was_checked() -> None:
    body, site = await fetched(HEAD + b"Content-Length: 3\r\n\r\nabc", path="a b/ü?q=1 2#part")
    assert body == b"abc"
    first, *headers = site.asked[0].strip().split("\r\n")
    assert first == "GET /a%20b/%C3%BC?q=1%202 HTTP/1.1"
    assert f"Host: here.example:{site.port}" in headers and "Accept-Encoding: identity" in headers


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
        HEAD + b"\r\nabc",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + HEAD + b"\r\nabc",
    ],
)
async def test_all_ways_to_end_a_body(answer: bytes) -> None:
    assert (await fetched(answer))[0] == b"abc"


async def test_redirects_are_followed_and_checked_anew() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n"
    body, site = await fetched(moved % b"/y", moved % b"http://here.example:PORT/z", HEAD + b"\r\nabc")
    assert body == b"abc"
    assert [text.split()[1] for text in site.asked] == ["/x", "/y", "/z"]
    other = moved % b"http://there.example:PORT/"
    await refused(fetched(other), 400, "not one of those that --allowed-media-domains names")
    await refused(fetched(moved % b"file:///etc/passwd"), 400, "must be http")
    await refused(fetched(moved % b"http://[::1"), 422, "broke off its answer")
    await refused(fetched(*[moved % b"/x"] * 6), 422, "redirects more than 5 times")


async def test_a_redirect_to_what_is_not_public_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    moved = b"HTTP/1.1 307 Moved\r\nLocation: http://localhost:PORT/\r\n\r\n"
    site = Site(moved, HEAD + b"\r\nabc")
    names = Names("127.0.0.1", "127.0.0.2")
    async with serving(site.answer) as site.port:
        url = f"http://here.example:{site.port}/"
        await refused(Fetcher(None, 9, 5.0, resolve=names).fetch(url), 400, "has no public address")
        assert (len(site.asked), names.asked) == (1, ["here.example", "localhost"])


def test_names_of_hosts_are_those_that_are_looked_up() -> None:
    assert host_name("B\u00fccher.Example") == "xn--bcher-kva.example"


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254"])
async def test_private_addresses_are_refused_unless_their_host_is_named(address: str) -> None:
    url = "http://here.example/latest/meta-data"
    await refused(fetcher(address, domains=None).fetch(url), 400, "has no public address")
    other = fetcher(address, domains=frozenset({"there.example"}))
    await refused(other.fetch(url), 400, "not one of those")


async def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look-up of a rebinding attack would find another address."""
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    body, _ = await fetched(HEAD + b"\r\nabc", domains=None)
    assert body == b"abc"


PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%lo",
    "fc00::1",
    "fec0::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
]


def test_public_addresses_are_told_from_others() -> None:
    assert [address for address in PRIVATE if is_public(address)] == []
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808")))


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///x",
        "https://user:secret@here.example/",
        "http://here.example:99999/",
        "http://here example/",
        "http://here.example%0d%0aX:1/",
        "http://[::1/",
        "http://" + "a" * 64 + ".example/",
    ],
)
async def test_urls_that_are_none_are_refused(url: str) -> None:
    await refused(fetcher().fetch(url), 400, "A media URL must be http")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found", "answered with status 404"),
        (HEAD + b"Content-Length: 2000\r\n\r\n" + b"x" * 1500, "more than the 1000 bytes"),
        (HEAD + b"X: " + b"y" * 200_000, "more than the 1000 bytes"),
        (HEAD + b"Content-Length: 9\r\n\r\nabc", "broke off its answer"),
        (HEAD, "broke off its answer"),
        (b"", "broke off its answer"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "broke off its answer"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc", "broke off its answer"),
    ],
)
async def test_answers_that_cannot_be_used(answer: bytes, message: str) -> None:
    await refused(fetched(answer), 422, message)


async def test_bodies_are_bounded_in_bytes_and_seconds() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 100)
            await asyncio.sleep(0.01)

    async with serving(endless) as port:
        url = f"http://here.example:{port}/"
        await refused(fetcher().fetch(url), 422, "more than the 1000 bytes")
        slow = fetcher(most_bytes=10**9, seconds=0.2)
        await refused(slow.fetch(url), 422, r"was not fetched within 0\.2 s")


async def test_another_address_is_tried_when_one_is_not_there() -> None:
    async def both(host: str, port: int) -> list[str]:
        return ["127.0.0.9", "127.0.0.1"]

    site = Site(HEAD + b"\r\nabc")
    async with serving(site.answer) as site.port:
        found = await Fetcher(HERE, 9, 5.0, resolve=both).fetch(f"http://here.example:{site.port}/")
    assert found == b"abc"
    await refused(fetcher().fetch(f"http://here.example:{site.port}/"), 422, "is not reached")


async def test_a_certificate_must_be_of_the_name(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path, "here.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    told: list[str | None] = []
    context.sni_callback = lambda _, name, __: told.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate))
    site = Site(HEAD + b"\r\nabc")
    names = frozenset({"here.example", "there.example"})
    async with serving(site.answer, context) as port:
        secure = fetcher(domains=names, tls=trusting)
        assert await secure.fetch(f"https://here.example:{port}/") == b"abc"
        await refused(secure.fetch(f"https://there.example:{port}/"), 422, "is not reached")
        await refused(fetcher().fetch(f"https://here.example:{port}/"), 422, "is not reached")
    assert told == ["here.example", "there.example", "here.example"]
