"""The engine in this process: its start, its steps and its errors."""

from pathlib import Path
from typing import Any

import pytest
from driven import run_all, text
from fake_worker import (
    BREAKS_STEP,
    FakeExecutor,
    Landed,
    reference,
)
from msgspec.structs import replace
from sizes import engine_config

from engine_core.engine import Engine
from engine_core.executor import STEPS_BETWEEN
from engine_core.protocol import AddRequest, Failed, Tokens
from engine_core.reason_codes import QUARANTINED
from worker.protocol import Sampling, StepInput, StepOutput
from worker.worker_facts import WorkerFacts

Told = dict[tuple[int, int], list[Tokens | Failed]]


@pytest.fixture
def engine(model: Path) -> Engine:
    return start(model)


def start(model: Path, **changes: object) -> Engine:
    config = engine_config(model, **changes)
    return Engine.start(config, lambda _: None, FakeExecutor)


def add(id: int, tokens: list[int], max_tokens: int = 4) -> AddRequest:
    return AddRequest(id=id, tokens=tokens, params=Sampling(max_tokens=max_tokens))


def run(engine: Engine) -> Told:
    told: Told = {}
    for client, outputs in run_all(engine).items():
        for output in outputs:
            told.setdefault((client, output.id), []).append(output)  # pyright: ignore[reportArgumentType]
    return told


class Preparing(FakeExecutor):
    """Has three things to prepare, and notes before which step it prepared each."""

    prepared: list[int]

    def start(self) -> WorkerFacts:
        self.prepared, self.submitted, self.landed = [], 0, 0
        return replace(super().start(), has_idle_work=True)

    def submit(self, step: StepInput) -> Landed:
        self.submitted += 1
        return super().submit(step)

    def idle(self, *, wait: bool = False) -> bool:
        assert wait, "a step that waits for it would seem to take long"
        self.prepared.append(self.submitted)
        return len(self.prepared) < 3


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_a_worker_prepares_things_under_load_with_no_step_in_flight(model: Path, steps_ahead: int) -> None:
    made: list[Preparing] = []

    def make(*given: Any) -> Preparing:
        made.append(Preparing(*given))
        return made[0]

    engine = Engine.start(engine_config(model, steps_ahead=steps_ahead), lambda _: None, make)
    number, steps = 0, 0
    while steps < 5 * STEPS_BETWEEN:  # two requests are always live
        for _ in range(2 - len(engine._scheduler.live)):  # pyright: ignore[reportPrivateUsage]
            number += 1
            engine.add(0, add(number, [number % 20 + 5, 3], 40))
        before = len(made[0].prepared)
        in_flight = len(engine._in_flight.steps)  # pyright: ignore[reportPrivateUsage]
        engine.step()
        assert len(made[0].prepared) == before or in_flight == 0
        steps = made[0].submitted
    assert made[0].prepared == [STEPS_BETWEEN, 2 * STEPS_BETWEEN, 3 * STEPS_BETWEEN]
    engine.abort_all()
    run(engine)


def test_negative_steps_ahead_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="steps_ahead is -1"):
        start(model, steps_ahead=-1)


def test_a_step_that_breaks_ends_the_request_that_broke_it_and_nothing_else(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.add(0, add(1, [1, 2]))
    engine.add(1, add(2, [BREAKS_STEP]))
    told = run(engine)
    assert text(told[0, 1]) == reference([1, 2], 4)
    (failed,) = told[1, 2]
    assert isinstance(failed, Failed) and (failed.code, failed.error) == (500, QUARANTINED)
    assert "secret" not in failed.message and "secret detail" in caplog.text
    engine.add(0, add(3, [1, 2]))
    assert text(run(engine)[0, 3]) == reference([1, 2], 4)


def test_all_requests_of_one_client_can_be_aborted(engine: Engine) -> None:
    for client in (0, 1):
        for id in (1, 2):
            engine.add(client, add(id, [client + 5, id], max_tokens=20))
    engine.step()
    engine.abort_all(1)
    told = run(engine)
    finishes = {key: outputs[-1].finish for key, outputs in told.items() if isinstance(outputs[-1], Tokens)}
    assert finishes == {(0, 1): "length", (0, 2): "length", (1, 1): "abort", (1, 2): "abort"}


def test_the_prefix_cache_can_be_emptied(engine: Engine) -> None:
    cached = []
    for id in range(3):
        engine.add(0, add(id, list(range(1, 20))))
        if id == 2:
            engine.reset_prefix_cache()
        first = run(engine)[0, id][0]
        cached.append(isinstance(first, Tokens) and first.cached)
    assert cached == [0, 16, 0]


def test_what_runs_while_the_cache_is_emptied_is_found_by_nobody(engine: Engine) -> None:
    prompt = list(range(3, 22))
    answer = reference(prompt, 12)
    engine.add(0, add(0, prompt, max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.reset_prefix_cache()  # the weights are others now, perhaps
    assert answer[-1:] == text(run(engine)[0, 0])[-1:]
    engine.add(0, add(1, prompt))
    run(engine)
    engine.add(0, add(2, [*prompt, *answer, 1]))
    first = run(engine)[0, 2][0]
    assert isinstance(first, Tokens) and first.cached == 20, "what the second request has computed"


class Compiling(FakeExecutor):
    """Its worker has compiled three kernels when it is ready, and one more with the first step."""

    def start(self) -> WorkerFacts:
        return replace(super().start(), kernel_compilations=3)

    def submit(self, step: StepInput) -> Landed:
        landed = super().submit(step)
        assert isinstance(landed.output, StepOutput)
        landed.output = replace(landed.output, kernel_compilations=4)
        return landed


def test_compiled_kernels_are_told_from_the_start_on(model: Path) -> None:
    engine = Engine.start(engine_config(model), lambda _: None, Compiling)
    assert engine.stats().kernel_compilations == 3
    engine.add(0, add(1, [1, 2]))
    run(engine)
    assert engine.stats().kernel_compilations == 4


def test_messages_can_be_answered_while_it_sleeps(engine: Engine) -> None:
    """Its executor, which it has stopped, would say that it is dead."""
    engine.fall_asleep()
    assert engine.step(wait=False) == {}
