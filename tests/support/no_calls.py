"""The part of an executor that tests of steps have no use for."""

from engine_core.executor import CallFuture
from worker.calls.messages import WorkerCall


class NoCalls:
    """A base of executors to which no calls of workers are given."""

    def call(self, call: WorkerCall) -> CallFuture:
        raise AssertionError(f"no test here calls workers, and {call.method} was called")
