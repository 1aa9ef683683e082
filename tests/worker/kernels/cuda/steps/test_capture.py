"""The capture of work as a CUDA graph, with stand-ins for what torch asks the driver."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch

from worker.kernels.cuda.steps.graph_capture import CudaCapture


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Graph:
    """A graph that does nothing again, and holds nothing."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    def anything(*given: Any, **named: Any) -> nullcontext[None]:
        return nullcontext()

    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda target: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for context in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, context, anything)


def test_what_the_work_reads_lives_as_long_as_its_replay() -> None:
    """A plan that only the work holds: a card would read its memory in each replay, whoever has it then."""
    plan = torch.arange(4)
    seen = weakref.ref(plan)

    def capture(plan: torch.Tensor) -> Any:
        return CudaCapture(torch.device("cpu"))(lambda: plan + 1)

    result, replay = capture(plan)
    del plan
    gc.collect()
    assert seen() is not None
    replay()
    assert (result.tolist(), Graph.replays) == ([1, 2, 3, 4], 1)
    del replay
    gc.collect()
    assert seen() is None


def test_steps_wait_for_what_began_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)

    def fail() -> None:
        assert current.waited_for == []
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture(torch.device("cpu")).warm_up(fail)
    assert len(current.waited_for) == 1


def test_a_capture_that_fails_at_its_end_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's context of a graph sets the stream back only if the capture ends well."""
    before = Stream()
    current = [before]

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        outer, current[0] = current[0], entered
        try:
            yield
        finally:
            current[0] = outer

    @contextmanager
    def graph(graph: Graph, *, stream: Stream, **given: Any) -> Iterator[None]:
        current[0] = stream
        with suppress(RuntimeError):
            yield
        raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(RuntimeError, match="invalidated"):
        CudaCapture(torch.device("cpu"))(lambda: torch.ones(1))
    assert current == [before]
