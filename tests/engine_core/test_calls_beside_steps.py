"""Methods of workers that take long run beside steps, which do not wait for them."""

import sys
import threading
from types import ModuleType

import pytest
from fake_worker import Landed, facts
from sizes import worker_config

from engine_core.executor import InlineExecutor
from worker.calls.messages import ENTER_ADAPTER, READ_ADAPTER, WorkerCall, WorkerReturn
from worker.protocol import StepInput, StepOutput

stepped = threading.Event()


class Runner:
    """A worker that reads an adapter until a step is done."""

    facts = facts()
    store = None

    def __init__(self, *given: object) -> None: ...

    def launch(self, step: StepInput, following: object) -> Landed:
        return Landed(StepOutput(step.number, [], [], {}))

    def call(self, call: WorkerCall) -> WorkerReturn:
        return WorkerReturn(call.number, call.method == ENTER_ADAPTER or stepped.wait(20))

    def lost(self, error: Exception) -> bool:
        return False

    def close(self) -> None: ...


def report(phase: str, fraction: float, detail: str = "") -> None: ...


def test_no_step_waits_for_an_adapter_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("worker.runner")
    module.__dict__["Runner"] = Runner
    monkeypatch.setitem(sys.modules, "worker.runner", module)
    executor = InlineExecutor(worker_config(), report)
    executor.start()
    reading = executor.call(WorkerCall(1, READ_ADAPTER))
    assert executor.submit(StepInput(1, [], [])).result().number == 1
    assert executor.call(WorkerCall(2, ENTER_ADAPTER)).result() == [WorkerReturn(2, True)]
    assert not reading.done()
    stepped.set()
    assert reading.result() == [WorkerReturn(1, True)]
    executor.stop()
