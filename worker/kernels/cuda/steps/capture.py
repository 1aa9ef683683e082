"""The capture of work on a card as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


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
