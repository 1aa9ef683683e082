"""Matchers follow the tokens of an answer and say which may come next. This imports nothing of llguidance."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Protocol

from engine_core.protocol import Thinking
from worker.protocol import Bound


class GrammarError(Exception):
    """A text cannot be followed any further. Its message is for the client, whose request fails with 400."""


class TokenMatcher(Protocol):
    """Says what may come next in the text of one sequence.

    Each sequence has a matcher of its own, which is asleep while any token may come. `take` gets every token
    of the answer once, in order; a sequence that is preempted keeps its matcher as it keeps its tokens. Both
    `take`, `settle` and `bound` may raise GrammarError, which ends this one request.

    A matcher whose computing takes long is `late` behind a token: nothing else is known of it until `settle`
    has returned true, and its sequence is in no step meanwhile.
    """

    def take(self, token: int, *, wakes: bool = True) -> None:
        """Go on behind a token of the answer. `wakes`: whether one that is asleep may wake behind it.

        Tokens that were sampled while it was asleep may be any. A token that ends answers, where it is
        allowed, makes it complete.
        """
        ...

    def bound(self) -> Bound | None:
        """What may be sampled next, at least one token; None: anything. It is not asked when complete."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the text is complete: the answer ends at once, without a step for its end token."""
        ...

    @property
    def binds(self) -> bool:
        """Whether it could be awake when the next token is sampled, or one of the few that are planned ahead.

        It is asked when a step is planned, before the tokens of the last ones are known: a row of which it
        says no is sampled without bounds.
        """
        ...

    @property
    def late(self) -> bool:
        """Whether what comes behind the last token is still being computed."""
        ...

    def settle(self, wait: float = 0.0) -> bool:
        """Go on if what was late is done, waiting for it for so many seconds; returns whether it is."""
        ...

    def abandon(self) -> None:
        """Let what is being computed go: the answer has ended."""
        ...

    def fork(self) -> TokenMatcher:
        """Another matcher at the same place, which goes its own way until this one goes on. It is never late,
        but raises GrammarError for what takes long."""
        ...

    def forced(self) -> list[int]:
        """The next tokens of which no other may come instead, as far as they are found without much work."""
        ...


class ThinkingMatcher:
    """Follows the thinking of an answer, keeps it to its budget, and passes tokens on to its grammar.

    While the answer thinks, a grammar sleeps, or lets any text pass: a call that is only mentioned there is
    none. All thinking of an answer has one budget. When that is spent, the marker that closes the thinking is
    all that may come; what opens again is closed at once. A grammar that is awake there delays the marker by
    the tokens of a character that has begun.
    """

    def __init__(self, thinking: Thinking, ahead: int, grammar: TokenMatcher | None) -> None:
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
        thinking = self._thinking
        self._tail = [*self._tail, token][-self._longest :]
        self._spent += self._open
        turns = (thinking.marker, *thinking.ends) if self._open else thinking.opens
        if any(map(self._ends_with, turns)):
            self._open = not self._open
            self._tail = []

    def bound(self) -> Bound | None:
        bound = None if self._grammar is None else self._grammar.bound()
        if (rest := self._due()) and allows(bound, rest[0]):
            return Bound("allowed", array("i", rest[:1]).tobytes())
        return bound

    def _due(self) -> list[int]:
        """What is left of the marker that closes the thinking, if its budget is spent."""
        budget, marker = self._thinking.budget, self._thinking.marker
        if budget is None or not self._open or self._spent < budget:
            return []
        begun = next(count for count in range(len(marker) - 1, -1, -1) if self._ends_with(marker[:count]))
        return list(marker[begun:])

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

    @property
    def late(self) -> bool:
        return self._grammar is not None and self._grammar.late

    def settle(self, wait: float = 0.0) -> bool:
        return self._grammar is None or self._grammar.settle(wait)

    def abandon(self) -> None:
        if self._grammar is not None:
            self._grammar.abandon()

    def fork(self) -> ThinkingMatcher:
        fork = copy(self)  # its list of tokens is never changed, but replaced
        fork._grammar = None if self._grammar is None else self._grammar.fork()
        return fork

    def forced(self) -> list[int]:
        return self._due() or ([] if self._grammar is None else self._grammar.forced())

    def _ends_with(self, tokens: Sequence[int]) -> bool:
        count = len(tokens)
        return not count or self._tail[-count:] == list(tokens)


def allows(bound: Bound | None, token: int) -> bool:
    if bound is None:
        return True
    if bound.form == "bits":
        at = token // 8
        return at < len(bound.data) and bool(bound.data[at] >> token % 8 & 1)
    return (token in array("i", bound.data)) == (bound.form == "allowed")
