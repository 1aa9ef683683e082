"""The capture of work on a card as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")

Capture = Callable[[Callable[[], Result]], tuple[Result, Callable[[], None]]]
"""The type of a function that captures work: its result, and the function that does the work again.

The result stays where it is: whoever replays finds the new numbers there.
"""


class CudaCapture:
    """Captures on a stream of its own. All graphs share one pool of memory: they run one after another."""

    def __init__(self, target: torch.device) -> None:
        self._stream = torch.cuda.Stream(target)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # kernels are compiled, and libraries take what they need, before anything is captured
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for outputs meanwhile, which a capture in the global mode would not survive.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
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
