"""The inline executor with another runner than the real one, which would import torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import ClassVar

import pytest
import zmq
from fake_worker import FakeWorker, Landed, facts
from msgspec.structs import replace
from sizes import worker_config

from engine_core.executor import ExecutorDead, InlineExecutor, StepFuture
from worker.config import WorkerConfig
from worker.protocol import SeqStep, StepBounds, StepInput, StepOutput


class AcceleratorError(RuntimeError):
    """The error of a failed device, by its name."""


def no_bounds() -> StepBounds:
    raise AssertionError("nothing follows the step")


class Runner(FakeWorker):
    fails: BaseException | None = None
    threads: set[int] = set()
    closed = False
    store = None
    has_idle_work = False
    device = "cpu"
    read: ClassVar[list[int]] = []

    def __init__(self, config: WorkerConfig, report: Callable[[str, float], None]) -> None:
        super().__init__(replace(facts(has_idle_work=self.has_idle_work), device=self.device))
        self.threads.add(threading.get_ident())
        report("weights", 1.0)

    def launch(self, step: StepInput, following: Callable[[], StepBounds] = no_bounds) -> Landed:
        self.threads.add(threading.get_ident())
        if any(seq.bound for seq in step.seqs):
            self.read.append(following().number)
        if self.fails is not None:
            raise self.fails
        return Landed(StepOutput(step.number, [], [], {}))

    def close(self) -> None:
        type(self).closed = True


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[Runner]:
    module = ModuleType("worker.runner")
    fresh = type("Runner", (Runner,), {"threads": set(), "read": []})
    module.Runner = fresh  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "worker.runner", module)
    return fresh


@pytest.fixture
def executor(runner: type[Runner]) -> Iterator[InlineExecutor]:
    """An executor that has started, and ends with the test."""
    made = InlineExecutor(worker_config(), lambda *_: None)
    made.start()
    yield made
    made.stop()


def test_a_step_that_is_done_wakes_a_poll(executor: InlineExecutor) -> None:
    first, second = zmq.Poller(), zmq.Poller()
    for number, poller in enumerate((first, first, second)):
        executor.register(poller)
        assert not poller.poll(0)
        step = executor.submit(StepInput(number, [], []))
        assert poller.poll(5000)
        assert step.done() and step.result().number == number


def test_an_idle_worker_prepares_one_thing_after_the_other(runner: type[Runner]) -> None:
    executor = InlineExecutor(worker_config(), lambda *progress: None)
    executor.start()
    assert not executor.idle(), "there is nothing to prepare"
    executor.stop()
    runner.has_idle_work = True
    executor = InlineExecutor(worker_config(), lambda *progress: None)
    executor.start()
    poller = zmq.Poller()
    for _ in range(2):
        executor.register(poller)
        assert executor.idle()
        assert poller.poll(5000), "it wakes when that is prepared"
    assert executor.idle(wait=True)
    assert not executor.idle()
    executor.stop()


def test_everything_runs_in_one_thread_which_is_not_the_engines(runner: type[Runner]) -> None:
    told: list[tuple[str, float]] = []
    executor = InlineExecutor(worker_config(), lambda *progress: told.append(progress))
    assert executor.start() == replace(facts(), device="cpu")
    assert told == [("weights", 1.0)]
    pending = [executor.submit(StepInput(number, [], [])) for number in range(3)]
    assert [step.result().number for step in pending] == [0, 1, 2]
    executor.stop()
    assert len(runner.threads) == 1 and threading.get_ident() not in runner.threads
    assert runner.closed


def here(executor: InlineExecutor, step: StepInput) -> StepFuture:
    future = executor.submit_here(step)
    assert future is not None
    return future


def test_a_step_runs_in_the_calling_thread_while_the_workers_has_nothing_to_do(
    runner: type[Runner], executor: InlineExecutor
) -> None:
    step = here(executor, StepInput(1, [], []))
    assert step.done() and step.result().number == 1
    assert threading.get_ident() in runner.threads
    before = executor.submit(bound_step(2))
    assert executor.submit_here(StepInput(3, [], [])) is None
    executor.bind(StepBounds(2, {0: None}))
    assert before.result().number == 2
    assert here(executor, StepInput(3, [], [])).result().number == 3


def test_a_device_is_used_by_one_thread_alone(runner: type[Runner]) -> None:
    runner.device = "cuda"
    executor = InlineExecutor(worker_config(), lambda *_: None)
    executor.start()
    assert executor.submit_here(StepInput(1, [], [])) is None
    executor.stop()


@pytest.mark.parametrize("submit", [InlineExecutor.submit, here])
def test_a_failed_step_is_told_by_its_result_and_the_next_one_runs(
    runner: type[Runner], executor: InlineExecutor, submit: Callable[[InlineExecutor, StepInput], StepFuture]
) -> None:
    runner.fails = ValueError("odd input")
    failed = submit(executor, StepInput(1, [], []))
    with pytest.raises(ValueError, match="odd input"):
        failed.result()
    runner.fails = SystemExit(3)
    with pytest.raises(ExecutorDead, match="SystemExit"):
        submit(executor, StepInput(2, [], [])).result()
    runner.fails = None
    assert submit(executor, StepInput(3, [], [])).result().number == 3


def bound_step(number: int) -> StepInput:
    return StepInput(number, [], [SeqStep(0, 0, 1, [], samples=True, bound=True)])


def test_a_step_waits_for_its_bounds_and_the_engine_does_not(
    runner: type[Runner], executor: InlineExecutor
) -> None:
    first, second = executor.submit(bound_step(1)), executor.submit(bound_step(2))
    assert not first.done() and not second.done()
    executor.bind(StepBounds(1, {0: None}))
    assert first.result().number == 1 and not second.done()
    executor.bind(StepBounds(2, {0: None}))
    assert second.result().number == 2
    assert runner.read == [1, 2]


def test_steps_that_wait_for_bounds_end_with_the_worker(runner: type[Runner]) -> None:
    executor = InlineExecutor(worker_config(), lambda *_: None)
    executor.start()
    steps = [executor.submit(bound_step(number)) for number in (1, 2)]
    executor.stop()
    for step in steps:
        with pytest.raises(ExecutorDead):
            step.result()
    assert runner.closed


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AcceleratorError("an illegal memory access was encountered"), "illegal memory access"),
        (SystemExit(0), "the worker has ended: SystemExit"),
    ],
)
def test_a_failed_device_or_thread_is_not_a_failed_step(
    runner: type[Runner], executor: InlineExecutor, error: BaseException, words: str
) -> None:
    runner.fails = error
    with pytest.raises(ExecutorDead, match=words):
        executor.submit(StepInput(1, [], [])).result()


def test_what_stops_the_load_is_raised_by_start(
    runner: type[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such tensor")

    monkeypatch.setattr(runner, "__init__", fail)
    executor = InlineExecutor(worker_config(), lambda *_: None)
    with pytest.raises(ValueError, match="no such tensor"):
        executor.start()
    with pytest.raises(ExecutorDead):
        executor.submit(StepInput(1, [], []))
    executor.stop()


def test_torch_is_imported_only_when_a_model_is_loaded() -> None:
    """A process of its own shows it: this one may have loaded torch for other tests."""
    import subprocess

    code = (
        "import sys, engine_core.engine_main, engine_core.engine_children; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0
