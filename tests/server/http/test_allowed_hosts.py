"""The Host and Origin headers that are taken, by the address that is listened to."""

from collections.abc import Collection

import pytest

from server.http.connection.hosts_and_proxies import HostRules
from server.options.option_checks import is_loopback

TAKEN, WRONG_HOST, FOREIGN = None, 421, 403


def status(rules: HostRules, host: str, origin: str | None = None) -> int | None:
    error = rules.refusal(host.encode(), None if origin is None else origin.encode())
    return None if error is None else error.status


def rules_for(address: str | None, hosts: Collection[str] = (), origins: Collection[str] = ()) -> HostRules:
    return HostRules(address, allowed_hosts=hosts, allowed_origins=origins)


@pytest.mark.parametrize(
    ("address", "hosts", "host", "expected"),
    [
        ("127.0.0.1", [], "localhost", TAKEN),
        ("127.0.0.1", [], "LocalHost:8000", TAKEN),
        ("127.0.0.1", [], "localhost.:80", TAKEN),
        ("127.0.0.1", [], "127.0.0.1", TAKEN),
        ("127.0.0.1", [], "127.0.0.1:9", TAKEN),
        ("127.0.0.1", [], "evil.example", WRONG_HOST),
        ("127.0.0.1", [], "evil.example:8000", WRONG_HOST),
        ("127.0.0.1", [], "localhost.evil.example", WRONG_HOST),
        ("127.0.0.1", [], "127.0.0.1.evil.example", WRONG_HOST),
        ("127.0.0.1", [], "xlocalhost", WRONG_HOST),
        ("127.0.0.1", [], "localhost:x", WRONG_HOST),
        ("127.0.0.1", [], "192.168.0.7", WRONG_HOST),
        ("127.0.0.1", [], "\xfc.example", WRONG_HOST),
        ("127.0.0.1", ["api.example"], "API.example:8000", TAKEN),
        ("127.0.0.1", ["api.example"], "localhost", TAKEN),
        ("127.0.0.1", ["api.example"], "x.api.example", WRONG_HOST),
        ("127.0.0.1", ["*"], "evil.example", TAKEN),
        ("127.0.0.3", [], "127.0.0.3:80", TAKEN),
        ("127.0.0.3", [], "127.0.0.1", WRONG_HOST),
        ("localhost", [], "127.0.0.1:80", TAKEN),
        ("localhost", [], "[::1]:80", TAKEN),
        ("localhost", [], "evil.example", WRONG_HOST),
        ("::1", [], "[::1]", TAKEN),
        ("::1", [], "[::1]:8000", TAKEN),
        ("::1", [], "localhost", TAKEN),
        ("::1", [], "evil.example", WRONG_HOST),
        ("0.0.0.0", [], "anything.example", TAKEN),
        ("0.0.0.0", ["api.example"], "api.example", TAKEN),
        ("0.0.0.0", ["api.example"], "10.1.2.3:8000", TAKEN),
        ("0.0.0.0", ["api.example"], "[fe80::1]:8000", TAKEN),
        ("0.0.0.0", ["api.example"], "evil.example", WRONG_HOST),
        ("0.0.0.0", ["localhost"], "evil.example", WRONG_HOST),
        (None, [], "whatever", TAKEN),
        (None, ["api.example"], "whatever", WRONG_HOST),
    ],
)
def test_hosts(address: str | None, hosts: list[str], host: str, expected: int | None) -> None:
    assert status(rules_for(address, hosts), host) == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", None])
@pytest.mark.parametrize(
    ("origins", "host", "origin", "expected"),
    [
        ([], "localhost:8000", "http://localhost:8000", TAKEN),
        ([], "localhost:8000", "HTTP://LOCALHOST:8000", TAKEN),
        ([], "localhost", "https://localhost", TAKEN),
        ([], "localhost:8000", "http://localhost:3000", FOREIGN),
        ([], "localhost:8000", "http://evil.example", FOREIGN),
        ([], "localhost", "http://localhost.evil.example", FOREIGN),
        ([], "localhost", "null", FOREIGN),
        ([], "localhost", "", FOREIGN),
        ([], "localhost", "localhost", FOREIGN),
        ([], "localhost", "http://x@localhost", FOREIGN),
        (["http://localhost:3000"], "localhost:8000", "http://localhost:3000", TAKEN),
        (["http://localhost:3000"], "localhost:8000", "https://localhost:3000", FOREIGN),
        (["*"], "localhost:8000", "http://evil.example", TAKEN),
        (["*"], "localhost:8000", "null", TAKEN),
        (["null"], "localhost:8000", "null", TAKEN),
    ],
)
def test_origins(
    address: str | None, origins: list[str], host: str, origin: str, expected: int | None
) -> None:
    assert status(rules_for(address, origins=origins), host, origin) == expected


def test_the_name_in_an_error_is_short_and_clean() -> None:
    error = rules_for("127.0.0.1").refusal(b"\x1b[31m" + b"x" * 5000, None)
    assert error is not None
    assert "\x1b" not in error.message
    assert len(error.message) <= 1000


def test_addresses_that_only_this_machine_reaches() -> None:
    assert [is_loopback(one) for one in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(one) for one in ("0.0.0.0", "::", "10.0.0.1", "some.name")] == [False] * 4
