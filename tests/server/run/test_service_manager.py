"""What a service manager hears, on a socket of the test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.run.service_manager import ServiceManager
from worker.host.machine import service_manager


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.setblocking(False)
        yield found


def heard(listener: socket.socket) -> list[str]:
    notices: list[str] = []
    while True:
        try:
            notices.append(listener.recv(4096).decode().partition("\n")[0])
        except BlockingIOError:
            return notices


def test_it_hears_of_the_start_and_the_end(listener: socket.socket) -> None:
    manager = ServiceManager(listener.getsockname(), 0.0)
    manager.ready()
    manager.live()
    manager.stopping()
    assert heard(listener) == ["READY=1", "STOPPING=1"], "nobody asked for signs of life"


def test_it_hears_several_times_in_its_patience_that_the_server_lives(listener: socket.socket) -> None:
    now = 50.0
    manager = ServiceManager(listener.getsockname(), 3.0, lambda: now)
    notices: list[str] = []
    for _ in range(60):
        manager.live()
        notices += heard(listener)
        now += 0.5
    assert notices == ["WATCHDOG=1"] * 30


def test_abstract_sockets_are_found() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.setblocking(False)
        name = listener.getsockname()
        ServiceManager("@" + name[1:].decode(), 0.0).ready()
        assert heard(listener) == ["READY=1"]


def test_without_a_listener_nothing_happens(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    ServiceManager("", 3.0).ready()
    assert not caplog.records
    ServiceManager(str(tmp_path / "gone"), 0.0).ready()
    assert "the service manager does not take notices" in caplog.text


def test_the_variables_of_systemd_are_read() -> None:
    assert service_manager({}) == ("", 0.0)
    environ = {"NOTIFY_SOCKET": "/run/systemd/notify", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}
    assert service_manager(environ, 7) == ("/run/systemd/notify", 30.0)
    assert service_manager(environ, 8) == ("/run/systemd/notify", 0.0), "it watches another process"
    assert service_manager({"WATCHDOG_USEC": "x"}) == ("", 0.0)
