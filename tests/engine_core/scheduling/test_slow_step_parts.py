"""Parts of steps that take longer than expected, and what is said of them."""

# pyright: reportPrivateUsage=false
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driven import run_all
from fake_worker import FakeExecutor, Landed
from holdups import holdups
from sizes import engine_config

from engine_core import protocol
from engine_core.engine import Engine
from engine_core.engine_main import EngineLoop
from engine_core.protocol import AddRequest
from engine_core.scheduling import slow_step_parts
from engine_core.scheduling.slow_step_parts import StepWatch
from worker.protocol import Sampling

SLOW = 0.12
"""More than a part may take, in seconds."""


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread have lacked a core, whatever else the machine does."""
    monkeypatch.setattr(slow_step_parts.CoreWaits, "update", lambda waits: waits.seconds)


@pytest.fixture
def loop(model: Path) -> Iterator[EngineLoop]:
    loop = EngineLoop(Engine.start(engine_config(model), lambda _: None, FakeExecutor), [], 0.0)
    yield loop
    loop._engine.stop()
    for sock in (loop._signalled, loop._wake):
        sock.close()


def hold_up(owner: object, method: str) -> None:
    """Make a method take long, in a function of a name that shows in stacks."""
    call = getattr(owner, method)

    def slow_work(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW)
        return call(*args, **kwargs)

    setattr(owner, method, slow_work)


def run_one(engine: Engine) -> None:
    engine.add(0, AddRequest(id=1, tokens=[5, 6], params=Sampling(max_tokens=1)))
    run_all(engine)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.args[0]) for record in caplog.records if isinstance(record.args, tuple)]


@pytest.mark.parametrize(
    ("owner", "method", "part"),
    [
        ("_in_flight", "receive", "step"),
        ("_scheduler", "schedule", "plan"),
        ("_executor", "submit", "submission"),
        ("_scheduler.results", "land", "landing"),
    ],
)
def test_a_part_that_takes_long_is_named_once_with_its_stack(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture, owner: str, method: str, part: str
) -> None:
    found: Any = loop._engine
    for name in owner.split("."):
        found = getattr(found, name)
    hold_up(found, method)
    StepWatch(loop)
    run_one(loop._engine)
    assert set(named(caplog)) == {part}
    [entry] = holdups(caplog.text)
    assert entry.startswith(f"{part}: ") and entry.endswith("slow_work")


def test_quick_steps_are_not_named(loop: EngineLoop, caplog: pytest.LogCaptureFixture) -> None:
    StepWatch(loop)
    run_one(loop._engine)
    assert not caplog.records


@pytest.mark.parametrize("expected", [1e-3, SLOW])
def test_a_step_of_the_worker_is_judged_by_what_was_expected(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, expected: float
) -> None:
    engine = loop._engine
    step_time = engine._scheduler.pace.step_time
    step_time._set([expected, *step_time._seconds[1:]])
    monkeypatch.setattr(Landed, "result", Landed.result)  # that is there again after this test
    hold_up(Landed, "result")
    StepWatch(loop)
    run_one(engine)
    assert set(named(caplog)) == (set() if expected == SLOW else {"worker"})


def test_what_waits_is_not_named_while_cores_are_lacking(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_step_parts.CoreWaits, "update", lambda waits: waits.seconds + 2 * SLOW)
    hold_up(loop._engine._scheduler, "schedule")
    StepWatch(loop)
    run_one(loop._engine)
    assert not caplog.records


def test_what_computes_is_named_whoever_lacks_a_core(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(_: float) -> None:
        until = time.thread_time() + SLOW
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(slow_step_parts.CoreWaits, "update", lambda waits: waits.seconds + 9.0)
    monkeypatch.setattr(loop._engine._scheduler, "schedule", compute)
    StepWatch(loop)
    loop._engine.add(0, AddRequest(id=1, tokens=[5, 6], params=Sampling(max_tokens=1)))
    loop._engine.step()
    assert named(caplog) == ["plan"]


def test_a_model_that_is_loaded_again_is_watched_again(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture
) -> None:
    StepWatch(loop)
    for level in (1, 0):
        loop._handler.handle(0, protocol.Sleep(level))
        loop._obey()
    hold_up(loop._engine._scheduler, "schedule")  # around what is measured: nobody is to blame but `step`
    run_one(loop._engine)
    assert hasattr(loop._engine._scheduler.bind, "__wrapped__")
    assert set(named(caplog)) == {"step"}
