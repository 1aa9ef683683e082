"""The client behind a proxy: whose word is taken, and which words are addresses."""

from typing import Any

import pytest
from fake_connection import EchoApp, FakeServer, settled

from server.http.connection.hosts_and_proxies import TrustedProxies

PEER = ("127.0.0.1", 5)
LOCAL = TrustedProxies("127.0.0.1,::1")


def client_of(proxies: TrustedProxies, *forwarded: bytes) -> Any:
    scope = {"client": PEER, "headers": [(b"x-forwarded-for", value) for value in forwarded]}
    proxies.identify(scope)
    return scope["client"]


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ([b"10.0.0.7"], ("10.0.0.7", 0)),
        ([b"10.0.0.7:81"], ("10.0.0.7", 81)),
        ([b" 2001:DB8::0:1 "], ("2001:db8::1", 0)),
        ([b"[2001:db8::1]:81"], ("2001:db8::1", 81)),
        ([b"<anything>, 10.0.0.7, 127.0.0.1"], ("10.0.0.7", 0)),
        ([b"<anything>", b"10.0.0.7"], ("10.0.0.7", 0)),
        ([b"127.0.0.1, ::1"], ("127.0.0.1", 0)),
        ([b"10.0.0.7, <anything>"], PEER),
        ([b'evil" 200\x1b[2J'], PEER),
        ([b"fe80::1%any text"], PEER),
        ([b"10.0.0.7:eighty"], PEER),
        ([b"300.1.1.1"], PEER),
        ([b"\xe9" * 70_000], PEER),
        ([b""], PEER),
        ([], PEER),
    ],
)
def test_only_an_address_counts(forwarded: list[bytes], client: tuple[str, int]) -> None:
    assert client_of(LOCAL, *forwarded) == client


def test_who_is_a_proxy() -> None:
    assert LOCAL.trusts("127.0.0.1") and LOCAL.trusts("::1")
    assert not LOCAL.trusts("10.0.0.1") and not LOCAL.trusts(None)
    network = TrustedProxies(["10.0.0.0/8"])
    assert network.trusts("10.9.9.9") and not network.trusts("127.0.0.1")
    assert client_of(network, b"192.0.2.1, 10.0.0.2") == ("192.0.2.1", 0)
    everybody = TrustedProxies("*")
    assert everybody.trusts("192.0.2.1") and everybody.trusts(None)
    assert client_of(everybody, b"192.0.2.1, 10.0.0.2") == ("192.0.2.1", 0)
    with pytest.raises(ValueError, match="FORWARDED_ALLOW_IPS"):
        TrustedProxies("proxy.example")


@pytest.mark.parametrize(("proxies", "client"), [("10.0.0.1", "192.0.2.9"), ("127.0.0.1", "10.0.0.1")])
async def test_requests_of_a_proxy_have_the_client_when_they_begin(proxies: str, client: str) -> None:
    checked: list[Any] = []
    server = FakeServer(
        EchoApp(),
        proxies=TrustedProxies(proxies),
        check_head=lambda method, target, scope: checked.append((scope["client"][0], scope["scheme"])),
    )
    server.connect().send(
        b"GET /x HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.9\r\nX-Forwarded-Proto: https\r\n\r\n"
    )
    await settled()
    assert checked == [(client, "https" if client == "192.0.2.9" else "http")]
