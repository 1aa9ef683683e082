"""The supervisor: what it imports, and what the messages to API processes do on their way. Whole runs are in
tests/e2e/test_faults.py and tests/e2e/test_draining.py.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from server.options.server_options import parse
from server.run.api_process import in_loop
from server.run.supervisor import Supervisor
from server.run.supervisor_messages import (
    NOTHING_LEFT,
    CutOff,
    EngineExited,
    EngineGivenUp,
    Leaving,
    Message,
    Reload,
)
from worker.child import BROKE, CANNOT_START, STOPPED

LARGE = (
    "fastapi httptools jinja2 numpy pydantic starlette tokenizers torch transformers uvicorn uvloop yaml zmq"
)


@pytest.mark.parametrize(
    ("modules", "unknown"),
    [("server.commands, server.run.supervisor", LARGE), ("server.commands", f"{LARGE} asyncio")],
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
        supervisor = Supervisor(parse([], {}), listener, engines, no_servers)
        assert supervisor.may_return(code) == returns
        assert supervisor.code == ends_with


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
