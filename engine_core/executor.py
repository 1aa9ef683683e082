"""The executor's interface, which runs an engine's steps, and the executor of a worker in the same process.

Only through it does the engine reach code that needs torch.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import zmq

from worker.cache_tiers.tier import CacheTier
from worker.calls.messages import BESIDE_STEPS, CallWorkers, Returned, WorkerCall, WorkerReturn, results_of
from worker.config import WorkerConfig
from worker.protocol import StepBounds, StepInput, StepOutput
from worker.start_runner import start
from worker.worker_facts import WorkerFacts

if TYPE_CHECKING:
    from worker.runner import Runner

T = TypeVar("T")

STEPS_BETWEEN = 50
"""The steps after which a worker prepares one thing, though its engine is not idle. A CUDA graph takes as
long as a few steps, so it costs some percent of the time until all are there."""


class ReportPhase(Protocol):
    """A function that is told, from any thread, how far a model is loaded; `detail` is for people."""

    def __call__(self, phase: str, fraction: float, detail: str = "") -> None: ...


class ExecutorDead(OSError):
    """No step can run any more. Its message is for people, like that of any OSError."""


class OtherEngineDead(ExecutorDead):
    """Another engine has ended with which this one shares experts."""


class StepFuture(Protocol):
    """The output of a step, which may not be there yet."""

    def done(self) -> bool:
        """Whether `result` has hardly to wait: on a GPU for the device alone."""
        ...

    def result(self) -> StepOutput:
        """Waits for the output. Raises ExecutorDead, or the error that made this one step fail."""
        ...


class CallFuture(Protocol):
    """The returns of all workers to a call, which may not be there yet."""

    def done(self) -> bool: ...

    def result(self) -> list[WorkerReturn]:
        """Waits for all workers. Raises ExecutorDead."""
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    def start(self) -> WorkerFacts: ...

    def submit(self, step: StepInput) -> StepFuture: ...

    def bind(self, bounds: StepBounds) -> None:
        """Tell the bounds of a submitted step. There is one call for each step with bound rows, in order."""
        ...

    def idle(self, *, wait: bool = False) -> bool:
        """Called while no step is in flight: have the worker prepare one thing that makes steps quicker.

        Returns whether it does, or has with `wait`; false means that nothing is left. A poll wakes when it
        has. A step that is submitted meanwhile waits for a fraction of a second.
        """
        ...

    def call(self, call: WorkerCall) -> CallFuture:
        """Have every worker run a method behind the steps that are submitted. A poll wakes when all have.

        Methods of BESIDE_STEPS run at once, and hold no step up.
        """
        ...

    def stop(self) -> None: ...

    def register(self, poller: zmq.Poller) -> None:
        """Let the next poll wake when a step is done, or when no step can run any more.

        A step may be done before: look after this call, and before the poll.
        """
        ...

    def check(self) -> None:
        """Raises ExecutorDead if no step can run any more."""
        ...


class CallQueue:
    """The calls of workers that are under way, in their order."""

    def __init__(self, call: Callable[[WorkerCall], CallFuture]) -> None:
        """`call` is that of the executor."""
        self._call = call
        self._count = 0
        self.under_way: deque[tuple[int, int, CallFuture]] = deque()
        """The client and the id of each, and what comes of it."""

    def add(self, client: int, request: CallWorkers) -> None:
        """Have every worker run a method. `take` returns what came of it."""
        self.under_way.append((client, request.id, self.begin(request.method, request.args, request.kwargs)))

    def wait_for(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """What each worker has returned. Raises CallFailed."""
        return results_of(self.begin(method, args, kwargs).result())

    @property
    def has_returned(self) -> bool:
        """Whether `take` returns something."""
        return bool(self.under_way) and self.under_way[0][2].done()

    def take(self) -> Iterator[tuple[int, Returned]]:
        """The clients of calls that are done, and what workers have returned."""
        while self.has_returned:
            client, id, future = self.under_way.popleft()
            yield client, Returned(id, future.result())

    def begin(self, method: str, args: list[Any], kwargs: dict[str, Any] | None = None) -> CallFuture:
        """Have every worker run a method of which the caller takes what comes."""
        self._count += 1
        return self._call(WorkerCall(self._count, method, args, kwargs or {}))


class Preparation:
    """Has a worker prepare things under load, one after so many steps, if its engine is never idle."""

    def __init__(self, executor: Executor, *, is_left: bool) -> None:
        """`is_left`: whether there is something to prepare."""
        self._executor = executor
        self.due_in = STEPS_BETWEEN if is_left else inf
        """The steps until `run` should be called, before another step is planned, once none is in flight."""

    def run(self) -> None:
        """Prepare one thing, and wait for it: the time of no step is to be learned from it."""
        self.due_in = STEPS_BETWEEN if self._executor.idle(wait=True) else inf


MakeExecutor = Callable[[WorkerConfig, ReportPhase], Executor]


class InlineExecutor:
    """Runs the worker in a thread of the engine's process.

    Torch releases the interpreter's lock while it computes, so the engine plans and sends meanwhile.
    """

    def __init__(self, config: WorkerConfig, report: ReportPhase) -> None:
        self._config = config
        self._report = report
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        self._last: Future[Any] | None = None
        """What the worker's thread does, or will do after all else."""
        self._runner: Runner | None = None
        self._bounds: SimpleQueue[StepBounds | None] = SimpleQueue()
        """The bounds of steps that have not asked for them yet; None: none will follow."""
        self._step_done: tuple[socket.socket, socket.socket] | None = None
        """Becomes readable when a step is done, once somebody has registered to know it."""
        self._prepared: Future[bool] | None = None
        """Whether more is left to prepare. None: nothing is."""

    def start(self) -> WorkerFacts:
        """Loads the model. Nothing before this imports torch."""
        self._runner = self._thread.submit(start, self._config, self._report).result()
        if self._runner.facts.has_idle_work:
            self._prepared = Future()
            self._prepared.set_result(True)
        if self._runner.store is not None:
            self._runner.store.begin(self._thread.submit, self._tell)
        return self._runner.facts

    @property
    def store(self) -> CacheTier | None:
        """The blocks of the cache on disk or in the host's memory, if some are kept there."""
        return None if self._runner is None else self._runner.store

    def submit(self, step: StepInput) -> StepFuture:
        if self._runner is None:
            raise ExecutorDead("the worker is not started")
        launched: Future[_Launched] = self._in_thread(self._runner.launch, step, self._next_bounds)
        if self._step_done is not None:
            launched.add_done_callback(self._tell)
        return _InlineStep(launched, self._runner.lost)

    def submit_here(self, step: StepInput) -> StepFuture | None:
        """Runs a step at once, in the calling thread, which spares two changes of threads.

        No exception must interrupt that thread, nor bounds follow the step. Returns None if a device
        computes, or the worker's thread may do something meanwhile.
        """
        runner = self._runner
        if runner is None or runner.facts.device != "cpu" or runner.store is not None:
            return None
        if self._last is not None and not self._last.done():
            return None
        launched: Future[_Launched] = Future()
        try:
            launched.set_result(runner.launch(step))
        except BaseException as error:
            launched.set_exception(error)
        return _InlineStep(launched, runner.lost)

    def _in_thread(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Has the worker's thread do something, behind all that it has been given."""
        self._last = future = self._thread.submit(work, *arguments)
        return future

    def bind(self, bounds: StepBounds) -> None:
        self._bounds.put(bounds)

    def idle(self, *, wait: bool = False) -> bool:
        if self._prepared is None or self._runner is None:
            return False
        if self._prepared.done():
            if not self._prepared.result():
                self._prepared = None
                return False
            self._prepared = self._in_thread(self._runner.prepare)
            self._prepared.add_done_callback(self._tell)
        if wait:
            self._prepared.result()
        return True

    def call(self, call: WorkerCall) -> Future[list[WorkerReturn]]:
        if self._runner is None:
            raise ExecutorDead("the worker is not started")
        runner, beside = self._runner, call.method in BESIDE_STEPS
        returned = (self._beside.submit if beside else self._in_thread)(lambda: [runner.call(call)])
        returned.add_done_callback(self._tell)
        return returned

    def register(self, poller: zmq.Poller) -> None:
        if self._step_done is None:
            self._step_done = socket.socketpair()
            for end in self._step_done:
                end.setblocking(False)
        with suppress(BlockingIOError):
            self._step_done[0].recv(4096)
        poller.register(self._step_done[0], zmq.POLLIN)  # another one may follow an order to sleep or wake

    def stop(self) -> None:
        self._beside.shutdown()
        if self._runner is not None:
            self._thread.submit(self._runner.close)
        self._bounds.put(None)
        self._thread.shutdown()
        self._runner = None
        for end in self._step_done or ():
            end.close()

    def check(self) -> None:
        """Does nothing, because the worker lives as long as this process does."""

    def _next_bounds(self) -> StepBounds:
        """Called in the worker's thread by a step that waits for its bounds."""
        bounds = self._bounds.get()
        if bounds is None:
            self._bounds.put(None)
            raise ExecutorDead("the worker is being stopped")
        return bounds

    def _tell(self, _: object) -> None:
        if self._step_done is not None:
            with suppress(BlockingIOError):  # so many unread notices wake the poll as well
                self._step_done[1].send(b"\0")


class _Launched(Protocol):
    """A step that the worker has begun: on a GPU its output may still be on the way."""

    def result(self) -> StepOutput: ...


@dataclass(slots=True)
class _InlineStep:
    launched: Future[_Launched]
    lost: Callable[[Exception], bool]
    """Whether an error means that the device has failed."""

    def done(self) -> bool:
        return self.launched.done()

    def result(self) -> StepOutput:
        try:
            return self.launched.result().result()
        except Exception as error:
            if self.lost(error):
                raise ExecutorDead(f"the device failed: {error}") from error
            raise
        except BaseException as error:  # SystemExit and its like, which end a thread and not a step
            raise ExecutorDead(f"the worker has ended: {type(error).__name__}") from error
