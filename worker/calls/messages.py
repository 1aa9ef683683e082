"""The messages by which a method is called in every worker, between two steps, and what comes of it."""

from __future__ import annotations

from typing import Any

import msgspec

APPLY_MODEL = "apply_model"
"""The method by which a program has a function of its own called with the model."""


class WorkerCall(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """A call of a method of the worker, which runs between two steps."""

    number: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class WorkerReturn(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The return of a method that was called."""

    number: int
    result: Any = None
    error: str = ""
    """Why there is no result, if there is none."""


class CallWorkers(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """A request to run a method in every worker, between two steps. `Returned` is the answer."""

    id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Returned(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The returns of all workers."""

    id: int
    returns: list[WorkerReturn]


COMPARE_WEIGHTS = "compare_weights"
"""The method by which a worker compares the weights of a folder with its model, which they may replace.
It returns what does not fit."""
READ_ADAPTER, ENTER_ADAPTER, DROP_ADAPTER = "read_adapter", "enter_adapter", "drop_adapter"
"""The methods by which a worker reads the adapter of a folder for a number, lets steps compute with what it
has read, and gives it up again, or only what it has read."""
BESIDE_STEPS = frozenset({READ_ADAPTER})
"""The methods that take long and run in a thread of their own, beside steps."""


class AdapterFacts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A worker's facts on an adapter that it has loaded."""

    bytes: int
    """The memory that it takes."""
    tasks: tuple[str, ...] = ()
    """The tasks that it has a head of its own for. It does those of the base, too."""
    widths: dict[str, int] = {}
    """Task -> the numbers in each of its vectors, where they are others than those of the base."""
    labels: tuple[str, ...] = ()
    """The names of what its head tells apart, if its files say them."""


class CallFailed(RuntimeError):
    """A method could not be called in all workers, or has failed in one."""


class NoWorkers(CallFailed):
    """There are no workers to call, or they have ended meanwhile."""


def results_of(returns: list[WorkerReturn]) -> list[Any]:
    """What each worker has returned. Raises CallFailed with the first error of one."""
    for each in returns:
        if each.error:
            raise CallFailed(each.error)
    return [each.result for each in returns]
