"""Turns among the calls of one owner, so that a call of thousands of texts does not delay a single text."""

from __future__ import annotations

Call = tuple[int, int]
"""A client and the number of one of its calls, which is 0 if it has one text only."""


class Turns:
    """Start times in a fair order: each call's next text comes after as many tokens as its last one had."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[Call, float] = {}
        self._waiting: dict[Call, int] = {}

    def take(self, call: Call, tokens: int) -> float:
        """The turn of a call's next text."""
        turn = max(self._now, self._next.get(call, 0.0))
        if call[1]:
            self._next[call] = turn + tokens
        return turn

    def enter(self, call: Call) -> None:
        """Note that a text of this call waits."""
        self._waiting[call] = self._waiting.get(call, 0) + 1

    def leave(self, call: Call) -> None:
        """Note that a text of this call waits no more. A call of which none waits is forgotten."""
        self._waiting[call] -= 1
        if not self._waiting[call]:
            del self._waiting[call]
            self._next.pop(call, None)

    def advance(self, turn: float, tokens: int) -> None:
        """Move on by each waiting call's part of these tokens, or new calls would always come first."""
        self._now = max(self._now, turn) + tokens / len(self._waiting)
