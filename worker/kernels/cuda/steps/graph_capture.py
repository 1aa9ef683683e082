"""The capture of work on a card as a CUDA graph, by all ranks that share layers, or by none of them.

A captured exchange is replayed by all ranks together. So all must have the same graphs, and a rank that
cannot make one must leave no other waiting for its part of an exchange. Each graph is made in steps:

1. Each rank does the work by itself, without exchanges. Whoever runs short of memory, or has a model that
   cannot be recorded, learns it here, where nobody waits for it.
2. All say on the host how they fared. If one has failed, none goes on.
3. All do the work together: NCCL connects them in the ways that exchanges of these sizes take. Memory is no
   question any more, for the work has just been done. What fails here all the same ends the rank.
4. Each captures. Exchanges are only noted, so again nobody waits, and all say how they fared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from statistics import median
from typing import Generic, Protocol, TypeVar

import torch

from worker.ranks.process_groups import Groups

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_TIMED = 9
"""The replays that are timed."""


class Capture(Protocol):
    """Captures work, so that it can be done again."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do the work once: kernels are compiled, and libraries take what they need."""
        ...

    def __call__(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Capture work that was warmed up: its result, and the function that does it again.

        The result stays where it is: whoever replays finds the new numbers there.
        """
        ...

    def seconds(self, replay: Callable[[], None]) -> float:
        """The time that the device takes to do captured work again, while nothing else runs."""
        ...


class CudaCapture:
    """Captures on a stream of its own. All graphs share one pool of memory: they run one after another."""

    def __init__(self, target: torch.device) -> None:
        self._stream = torch.cuda.Stream(target)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:  # what had begun before an error writes where the next step does
            current.wait_stream(self._stream)

    def __call__(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # In the global mode a capture would not survive that other threads wait for outputs meanwhile, or ask
        # whether exchanges are over, as torch's watchdog of NCCL does. A capture that fails at its end leaves
        # its stream the current one, so all that follows would run there: the outer context ends that.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        return result, _Replay(graph, work)

    def seconds(self, replay: Callable[[], None]) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]
        for mark in marks:  # behind a first replay, which is not timed
            replay()
            mark.record()
        marks[-1].synchronize()
        return 1e-3 * median(one.elapsed_time(other) for one, other in pairwise(marks))


@dataclass(frozen=True, slots=True)
class _Replay:
    """A graph, and the work that it does again, which holds the tensors that were there before.

    torch keeps the memory that is taken within a capture, and no other: what the work alone holds (plans of
    attention, numbers of rows) would be given to others, and the graph would go on to read it.
    """

    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


class _Outcome(IntEnum):
    """The outcome of an attempt. Of several ranks the lowest counts."""

    IMPOSSIBLE = 0
    NO_MEMORY = 1
    MADE = 2


@dataclass(frozen=True, slots=True)
class GraphRecording(Generic[Result]):
    result: Result
    """The last replay left its results here."""
    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Missing:
    """A recording that no rank has."""

    short_of_memory: bool
    """Whether memory ran out, and nothing worse, so that a smaller one may succeed."""
    reason: str | None
    """Why it failed on this rank; None if it failed on others only, whose logs say why."""


class Recorder:
    def __init__(self, capture: Capture, groups: Groups) -> None:
        self._capture, self._groups = capture, groups

    def record(self, open_work: Callable[[], Callable[[], Result]]) -> GraphRecording[Result] | Missing:
        """Record the work that `open_work` returns. All ranks record the same, in the same order."""

        def rehearse() -> Callable[[], Result]:
            work = open_work()
            with self._groups.rehearsing():
                self._capture.warm_up(work)
            return work

        work = self._attempt(rehearse)
        if isinstance(work, Missing):
            return work
        if not self._groups.alone:
            self._capture.warm_up(work)
        return self._attempt(lambda: GraphRecording(*self._capture(work)))

    def compare(
        self, one: GraphRecording[Result], other: GraphRecording[Result]
    ) -> tuple[bool, tuple[float, float]]:
        """Whether one recording takes the device less time than another, and the milliseconds of both."""
        times = [[self._capture.seconds(each.replay) for each in (one, other)] for _ in range(3)]
        ours, others = (1e3 * median(column) for column in zip(*times, strict=True))
        return ours < others, (ours, others)

    def _attempt(self, attempt: Callable[[], Result]) -> Result | Missing:
        """What `attempt` returns, if it succeeds on all ranks."""
        made, reason, outcome = None, None, _Outcome.MADE
        try:
            made = attempt()
        except Exception as error:  # of the model's own code, too
            logger.debug("a graph cannot be made", exc_info=True)
            reason = str(error)  # the error itself would keep all that was made alive
            outcome = _Outcome.NO_MEMORY if _is_short_of_memory(error) else _Outcome.IMPOSSIBLE
        lowest = self._groups.minimum(int(outcome))
        if made is None or lowest < _Outcome.MADE:
            return Missing(lowest == _Outcome.NO_MEMORY, reason)
        return made


def _is_short_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, and perhaps the end of the capture broke, too."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False
