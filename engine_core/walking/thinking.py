"""The thinking of an answer: what is written there wakes no grammar, and it may have a budget."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine_core.protocol import Thinking
from engine_core.walking.walker import Walker
from worker.protocol import Bound


class ThinkingBudget:
    """A walker that follows the thinking of an answer, and beside it a grammar that may wake behind it.

    While it thinks, a grammar sleeps, or lets any token pass: a call that is only mentioned there is none.
    All thinking of an answer has one budget. When that is spent, the marker that closes the thinking is all
    that may come; what opens again is closed at once.
    """

    def __init__(self, thinking: Thinking, ahead: int, grammar: Walker | None) -> None:
        """`ahead`: the most tokens that are not known yet when a step is planned."""
        self._thinking = thinking
        self._ahead = ahead
        self._grammar = grammar
        self._open = thinking.open
        self._spent = 0
        self._longest = max(map(len, (thinking.marker, *thinking.opens, *thinking.ends)))
        self._tail: list[int] = []
        """The last tokens since thinking began or ended, as many as a marker may have."""

    def take(self, token: int, *, wakes: bool = True) -> None:
        thought = self._open
        self._follow(token)
        if self._grammar is not None:
            # The last token of the marker is not thought any more: a grammar may begin behind it.
            self._grammar.take(token, wakes=wakes and not (thought and self._open))

    def _follow(self, token: int) -> None:
        """Note whether the answer thinks behind this token."""
        self._tail = [*self._tail, token][-self._longest :]
        if self._open:
            self._spent += 1
            turns = self._ends_with(self._thinking.marker) or any(map(self._ends_with, self._thinking.ends))
        else:
            turns = any(map(self._ends_with, self._thinking.opens))
        if turns:
            self._open = not self._open
            self._tail.clear()

    def bound(self) -> Bound | None:
        budget = self._thinking.budget
        if budget is not None and self._open and self._spent >= budget:
            marker = self._thinking.marker
            begun = next(count for count in range(len(marker) - 1, -1, -1) if self._ends_with(marker[:count]))
            return Bound("allowed", array("i", [marker[begun]]).tobytes())
        return None if self._grammar is None else self._grammar.bound()

    @property
    def complete(self) -> bool:
        return self._grammar is not None and self._grammar.complete

    @property
    def binds(self) -> bool:
        budget = self._thinking.budget
        nearly_spent = budget is not None and budget - self._spent <= self._ahead
        if nearly_spent and (self._open or self._thinking.opens):
            return True
        return self._grammar is not None and self._grammar.binds

    def _ends_with(self, tokens: Sequence[int]) -> bool:
        count = len(tokens)
        return not count or self._tail[-count:] == list(tokens)
