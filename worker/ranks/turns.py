"""Two threads that compute the halves of a step in turns, so that exchanges are hidden behind computing.

One of them runs at a time. Where it would wait for an exchange with other replicas, the other one runs
first. That depends on nothing else, so the order of exchanges is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import Protocol

from torch import Tensor

from models.parallel.parallel import Collectives, Exchange

ComputeHalf = Callable[[], Tensor]
"""The type of a function that computes a half of a step."""


class OtherHalfFailedError(Exception):
    """Ends a half whose step cannot be completed, because the other half has failed."""


class _Turns:
    """The state of two threads, 0 and 1, of which 0 begins."""

    def __init__(self) -> None:
        self._running = 0
        self._may_run = (Semaphore(0), Semaphore(0))
        self._ended = [False, False]
        self.error: BaseException | None = None
        """The error of the half that failed first."""

    def hand_over(self) -> None:
        """Let the other thread run until it hands over or ends. Raises if it has failed."""
        own, other = self._running, 1 - self._running
        if self._ended[other]:
            return
        self._pass_to(other)
        self._await_turn(own)

    def run(self, own: int, compute: ComputeHalf) -> Tensor | None:
        """Compute a half in this thread; None if one of the halves fails."""
        try:
            if own:
                self._await_turn(own)
            return compute()
        except BaseException as error:  # whatever ends this half must end the other one, which waits for it
            self.error = self.error or error
            return None
        finally:
            self._ended[own] = True
            self._pass_to(1 - own)

    def _pass_to(self, other: int) -> None:
        self._running = other
        self._may_run[other].release()

    def _await_turn(self, own: int) -> None:
        self._may_run[own].acquire()
        if self.error is not None:
            raise OtherHalfFailedError


@dataclass(frozen=True, slots=True)
class _AfterTurn:
    """An exchange of one half. Who waits for it lets the other half compute first."""

    exchange: Exchange
    turns: _Turns

    def wait(self) -> None:
        self.turns.hand_over()
        self.exchange.wait()


class ClosingCollectives(Collectives, Protocol):
    """A group that is closed at the end."""

    def close(self) -> None: ...


class TurnGroup:
    """A group of ranks, one of each replica, which may compute a step in two halves."""

    def __init__(self, group: ClosingCollectives, rank: int) -> None:
        self.rank = rank
        self.exact = group.exact
        self._group = group
        self._turns: _Turns | None = None
        """The turns of the step under way, if it has two halves."""
        self._thread = ThreadPoolExecutor(1, "second half")

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x)

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        exchange = self._group.exchange(out, into)
        return exchange if self._turns is None else _AfterTurn(exchange, self._turns)

    def compute_both(self, first: ComputeHalf, second: ComputeHalf) -> tuple[Tensor, Tensor]:
        """Compute two halves, the first in this thread. Both must exchange equally often.

        The first half is never behind the second: what it has written, the second may read.
        """
        self._turns = turns = _Turns()
        try:
            later = self._thread.submit(turns.run, 1, second)
            results = turns.run(0, first), later.result()
        finally:
            self._turns = None
        if turns.error is not None:
            raise turns.error
        one, two = results
        if one is None or two is None:
            raise RuntimeError("a half of a step has no result")
        return one, two

    def close(self) -> None:
        self._thread.shutdown()
        self._group.close()
