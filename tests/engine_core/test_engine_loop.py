"""The loop that moves messages between an engine and its servers, in the process of the test."""

# pyright: reportPrivateUsage=false
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from fake_worker import FakeExecutor
from sizes import engine_config

from engine_core import engine_main
from engine_core.config import Address
from engine_core.engine import Engine
from engine_core.engine_main import EngineLoop
from engine_core.protocol import AddRequest, UpdateWeights
from engine_core.wire.links import open_engine_end
from engine_core.wire.unix_sockets import Channel
from worker.buffers import Encoder
from worker.protocol import Sampling


@pytest.fixture
def server(address: Address) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.requests.removeprefix("ipc://"))
        listener.listen()
        yield listener


@pytest.fixture
def loop(model: Path, address: Address, server: socket.socket) -> Iterator[EngineLoop]:
    engine, context = Engine.start(engine_config(model), lambda _: None, FakeExecutor), zmq.Context()
    loop = EngineLoop(engine, [open_engine_end(context, address, 0)], 0.0)
    yield loop
    engine.stop()
    loop._ends[0].close()
    context.term()
    for sock in (loop._signalled, loop._wake):
        sock.close()


def test_steps_have_their_turn_while_a_crowd_of_messages_waits(
    server: socket.socket, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_main, "_READ_SECONDS", 0.0)
    channel = Channel(server.accept()[0])
    for id in range(3):
        add = AddRequest(id=id, tokens=[1, 2], params=Sampling(max_tokens=1))
        channel.send(Encoder().encode(add))
    seen: set[int] = set()
    while len(loop._engine._scheduler.live) < 3:
        loop._read()
        seen.add(len(loop._engine._scheduler.live))
    channel.close()
    assert seen - {0} == {1, 2, 3}, "one message at a time"


def test_what_runs_steps_can_wake_the_loop_before_the_first_step(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor that is made while requests are here begins a step before the loop polls again."""
    registered: list[zmq.Poller] = []
    monkeypatch.setattr(loop._engine, "register", registered.append)
    loop._look_again()
    assert registered == [loop._poller]


def test_orders_of_weights_that_come_together_are_all_answered(loop: EngineLoop) -> None:
    loop._handler.updates.extend([(0, UpdateWeights("/nowhere", "check"))] * 2)
    loop._update()
    assert not loop._handler.updates
