"""The loop that moves messages between an engine and its servers, in the process of the test."""

# pyright: reportPrivateUsage=false
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import zmq
from fake_worker import FakeExecutor
from sizes import engine_config

from engine_core import engine_main
from engine_core.config import Address
from engine_core.engine import Engine
from engine_core.engine_main import EngineLoop
from engine_core.intake.intake import Intake
from engine_core.protocol import AddRequest, UpdateWeights
from engine_core.wire.transport import EngineEnd, ServerEnd
from worker.protocol import Sampling


@pytest.fixture
def server(address: Address) -> Iterator[ServerEnd]:
    end = ServerEnd(address)
    yield end
    end.close()


@pytest.fixture
def loop(model: Path, address: Address) -> Iterator[EngineLoop]:
    engine, context = Engine.start(engine_config(model), lambda _: None, FakeExecutor), zmq.Context()
    loop = EngineLoop(engine, [EngineEnd(context, address, engine=0)], 0.0)
    yield loop
    engine.stop()
    loop._ends[0].close()
    context.term()
    for sock in (loop._signalled, loop._wake):
        sock.close()


def test_steps_have_their_turn_while_a_crowd_of_messages_waits(
    server: ServerEnd, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_main, "_READ_SECONDS", 0.0)
    assert server.greetings.sock.poll(5000) and server.answers.sock.poll(5000)
    assert list(server.greetings.read()) == [hello for _, hello in server.read_answers()]
    for id in range(3):
        server.send(0, AddRequest(id=id, tokens=[1, 2], params=Sampling(max_tokens=1)))
    seen: set[int] = set()
    while len(loop._engine._scheduler.live) < 3:
        loop._read()
        seen.add(len(loop._engine._scheduler.live))
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


def test_weights_that_wait_for_an_adapter_wait_for_no_message_when_it_is_there(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Intake, "may_reload", False)
    loop._handler.updates.append((0, UpdateWeights("/nowhere", "check")))
    loop._update()
    assert loop._patience(idle=True) is None
    monkeypatch.setattr(Intake, "may_reload", True)  # a step has taken note of the adapter
    assert loop._patience(idle=True) == 0


def test_weights_that_a_server_has_ordered_are_loaded_before_another_may_order_some(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, told = loop._handler, list[tuple[int, bool]]()
    monkeypatch.setattr(handler, "_send", lambda client, answer: told.append((client, answer.is_taken)))
    for name in ("find_weights", "update_weights"):
        monkeypatch.setattr(loop._engine, name, lambda folder: None)

    def order(client: int, kind: Literal["check", "load", "give_up"]) -> None:
        handler.handle(client, UpdateWeights(f"/{client}", kind))

    order(0, "check")
    order(1, "check")  # another one holds the engine
    order(1, "give_up")
    order(0, "load")
    order(1, "check")
    order(0, "check")
    order(1, "give_up")
    order(0, "check")
    handler.forget(0)
    order(1, "check")
    loop._update()
    assert told == [(0, False), (1, True), (0, False), (1, False), (0, True), (0, False), (1, False)]
