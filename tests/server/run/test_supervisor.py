"""The supervisor: what it imports, and what the messages to API processes do on their way. Whole runs are in
tests/e2e/test_faults.py and tests/e2e/test_draining.py.
"""

# pyright: reportPrivateUsage=false

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine_core.engine_children import EngineProcesses
from server.options.parse_server_options import parse
from server.run import supervisor
from server.run.api_children import (
    NOTHING_LEFT,
    CutOff,
    EngineExited,
    EngineGivenUp,
    Leaving,
    Message,
    Reload,
)
from server.run.api_main import in_loop
from server.run.supervisor import ServiceManager, Supervisor
from worker.child import BROKE, CANNOT_START, STOPPED
from worker.host.machine import service_manager

LARGE = (
    "fastapi httptools jinja2 numpy pydantic starlette tokenizers torch transformers uvicorn uvloop yaml zmq"
)


@pytest.mark.parametrize(
    ("modules", "unknown"),
    [("server.run.commands, server.run.supervisor", LARGE), ("server.run.commands", f"{LARGE} asyncio")],
)
def test_it_imports_no_large_library_and_asyncio_after_children_are_started(
    modules: str, unknown: str
) -> None:
    """Libraries that are not there cannot break it or make it large."""
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & set(unknown.split()) == set()


@pytest.mark.parametrize(
    ("code", "has_served", "returns", "ends_with"),
    [
        (-9, False, True, None),
        (-9, True, True, None),
        (BROKE, False, False, BROKE),
        (BROKE, True, True, None),
        (CANNOT_START, False, False, CANNOT_START),
        (CANNOT_START, True, True, None),
        (STOPPED, True, True, None),  # somebody has asked it to end, and not the server
        (NOTHING_LEFT, True, False, BROKE),
    ],
)
async def test_what_becomes_of_an_api_process_that_has_ended(
    code: int, has_served: bool, returns: bool, ends_with: int | None
) -> None:
    engines: Any = SimpleNamespace(worked=has_served)
    no_servers: Any = []
    with socket.socket() as listener:
        found = Supervisor(parse([], {}), listener, engines, no_servers)
        assert found.may_return(code) == returns
        assert found.code == ends_with


async def test_process_1_of_a_container_waits_for_what_ended_engines_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, server = (SimpleNamespace(process=SimpleNamespace(pid=pid)) for pid in (7, 8))
    engines = EngineProcesses.__new__(EngineProcesses)
    monkeypatch.setattr(engines, "engines", [engine], raising=False)
    servers: Any = [server]
    known: list[set[int]] = []
    monkeypatch.setattr(supervisor, "reap_others", known.append)
    with socket.socket() as listener:
        found = Supervisor(parse([], {}), listener, engines, servers)
        found._look()
        monkeypatch.setattr("os.getpid", lambda: 1)
        found._look()
    assert known == [{7, 8}]


async def test_messages_are_handled_in_order_whenever_they_come() -> None:
    sent: list[Message] = [
        EngineExited(0, -9, 1.5),
        EngineGivenUp(0, "it broke", explained=False),
        Leaving(),
        CutOff(),
        Reload(),
    ]
    handled: list[Message] = []
    receive = in_loop(handled.append)
    receive(msgspec.msgpack.encode(sent[0]))  # while the process begins
    assert not handled
    await asyncio.to_thread(lambda: [receive(msgspec.msgpack.encode(one)) for one in sent[1:]])
    async with asyncio.timeout(60):
        while handled != sent:
            await asyncio.sleep(0)


def test_a_message_that_comes_when_the_loop_has_ended_is_no_error() -> None:
    async def begin() -> Callable[[bytes], None]:
        return in_loop(lambda message: None)

    asyncio.run(begin())(msgspec.msgpack.encode(Leaving()))


# What a service manager hears, on a socket of the test.


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
