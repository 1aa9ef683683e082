"""The limit of connections by the file descriptors that there are, and what the system is told of each."""

import resource
import socket
from collections.abc import Iterator

import pytest

from server.http.connection import connection_limits as limits
from server.http.connection import sockets
from server.http.connection.connection_limits import most_connections, why_too_few_descriptors

ENDLESS = resource.RLIM_INFINITY


class FakeLimits:
    def __init__(self, soft: int, hard: int) -> None:
        self.limits = soft, hard

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, which: int, values: tuple[int, int]) -> None:
        self.limits = values


@pytest.mark.parametrize(
    ("soft", "hard", "replicas", "expected", "raised_to"),
    [
        (ENDLESS, ENDLESS, 1, 1000, ENDLESS),
        (5000, 5000, 1, 1000, 5000),
        (1024, 5000, 1, 1000, 1056),
        (256, ENDLESS, 1, 1000, 1056),
        (1024, 1024, 1, 968, 1024),
        (64, 64, 1, 8, 64),
        (1024, 1024, 9, 936, 1024),
        (64, 64, 40, 1, 64),
    ],
)
def test_connections_leave_descriptors_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    replicas: int,
    expected: int,
    raised_to: int,
) -> None:
    fake = FakeLimits(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", fake.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", fake.setrlimit)
    assert most_connections(1000, replicas) == expected
    assert fake.limits == (raised_to, hard)
    assert (f"at most {expected} connections instead of 1000" in caplog.text) == (expected < 1000)


@pytest.mark.parametrize(("hard", "starts"), [(63, False), (64, True), (ENDLESS, True)])
def test_the_least_to_start_with(monkeypatch: pytest.MonkeyPatch, hard: int, starts: bool) -> None:
    monkeypatch.setattr(resource, "getrlimit", FakeLimits(10, hard).getrlimit)
    reason = why_too_few_descriptors()
    assert (reason is None) == starts
    if reason is not None:
        assert "is 63, and at least 64" in reason


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's end of a connection, and its client's."""
    with socket.socket() as listener:
        sockets.set_options(listener)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            accepted, _ = listener.accept()
            with accepted:
                yield accepted, client


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="options of Linux")
def test_connections_inherit_the_options_of_the_listener(pair: tuple[socket.socket, socket.socket]) -> None:
    accepted, _ = pair
    tcp = socket.IPPROTO_TCP
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert accepted.getsockopt(tcp, socket.TCP_KEEPIDLE) == limits.PROBE_AFTER_SECONDS
    assert accepted.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 1000 * limits.UNACKNOWLEDGED_SECONDS
    accepted.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while sent < 64 * limits.MAX_UNSENT:
            sent += accepted.send(bytes(4096))
    assert sent < 4 * limits.MAX_UNSENT  # what the client's system holds for it comes on top


def test_a_unix_socket_has_none_of_these_options() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        sockets.set_options(listener)


class Transport:
    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection

    def get_write_buffer_size(self) -> int:
        return 1000

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._connection


def test_what_the_client_has_not_taken_is_counted(pair: tuple[socket.socket, socket.socket]) -> None:
    accepted, client = pair
    accepted.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            accepted.send(bytes(4096))
    before = sockets.unread_bytes(Transport(accepted))  # pyright: ignore[reportArgumentType]
    taken_before = sockets.bytes_taken(Transport(accepted))  # pyright: ignore[reportArgumentType]
    assert before > 1000 + limits.MAX_UNSENT // 2
    taken = 0
    while taken < 200_000:
        taken += len(client.recv(65536))
    assert sockets.unread_bytes(Transport(accepted)) < before  # pyright: ignore[reportArgumentType]
    assert sockets.bytes_taken(Transport(accepted)) > taken_before  # pyright: ignore[reportArgumentType]
    accepted.close()
    for gone in (accepted, None):
        assert sockets.unread_bytes(Transport(gone)) == 1000  # pyright: ignore[reportArgumentType]
        assert sockets.bytes_taken(Transport(gone)) == -1000  # pyright: ignore[reportArgumentType]
