"""A budget of thinking, token by token: when rows are bound, and to which tokens."""

from __future__ import annotations

import pytest
from fake_worker import allowed_ids
from toy_language import Language, ToyMatcher

from engine_core.grammar.matcher import ThinkingMatcher
from engine_core.protocol import Thinking

MARKER = (1, 2, 3)


def walk(budget: ThinkingMatcher, tokens: list[int]) -> list[int | None]:
    """What may come before each of these tokens and behind the last: one token, or None for any."""
    found: list[int | None] = []
    for token in [*tokens, None]:
        bound = budget.bound()
        allowed = None if bound is None else allowed_ids(bound)
        assert allowed is None or len(allowed) == 1
        found.append(None if allowed is None else allowed[0])
        if token is not None:
            budget.take(token)
    return found


@pytest.mark.parametrize(
    ("thinking", "tokens", "allowed"),
    [
        # The marker comes token by token when the budget is spent, and at once if there is none.
        (Thinking(2, MARKER, open=True), [9, 9, 1, 2, 3, 9], [None, None, 1, 2, 3, None, None]),
        (Thinking(0, (7,), open=True), [7, 9], [7, None, None]),
        # What was written of the marker is not written again.
        (Thinking(2, MARKER, open=True), [9, 1, 2, 3], [None, None, 2, 3, None]),
        (Thinking(3, (1, 1, 2), open=True), [1, 1, 1, 2], [None, None, None, 2, None]),
        # Something else may end the thinking, which is bound no more.
        (Thinking(3, MARKER, open=True, ends=((8, 8), (5,))), [9, 8, 8, 9, 9], [None] * 6),
        # Only tokens behind the opening are counted.
        (Thinking(2, (7,), opens=((4, 5),)), [9, 9, 9, 4, 5, 9, 9, 7, 9], [None] * 7 + [7, None, None]),
        # Thinking that opens again is closed when all is spent.
        (
            Thinking(3, (7,), open=True, opens=((4,),)),
            [9, 7, 9, 4, 9, 7, 4, 7],
            [None] * 5 + [7, None, 7, None],
        ),
    ],
)
def test_what_may_come_next(thinking: Thinking, tokens: list[int], allowed: list[int | None]) -> None:
    budget = ThinkingMatcher(thinking, 0, None)
    assert walk(budget, tokens) == allowed
    assert not budget.complete


def test_thinking_that_has_ended_is_bound_no_more() -> None:
    closed = ThinkingMatcher(Thinking(4, MARKER, open=True), 9, None)
    assert closed.binds
    assert walk(closed, [1, 2, 3, 9, 9, 9, 9, 9]) == [None] * 9
    assert not closed.binds, "nothing opens it again"


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_rows_are_bound_only_in_the_last_steps(ahead: int) -> None:
    budget = ThinkingMatcher(Thinking(6, (7,), open=True), ahead, None)
    binds: list[bool] = []
    for token in [9] * 6 + [7, 9]:
        binds.append(budget.binds)
        budget.take(token)
    assert binds == [False] * (6 - ahead) + [True] * (ahead + 1) + [False]


class Sleeper:
    """A grammar that is asleep, and notes behind which tokens it may wake."""

    complete = binds = False

    def __init__(self) -> None:
        self.heard: list[tuple[int, bool]] = []

    def take(self, token: int, *, wakes: bool = True) -> None:
        self.heard.append((token, wakes))

    def bound(self) -> None:
        return None


def test_a_grammar_does_not_wake_while_it_thinks() -> None:
    sleeper = Sleeper()
    thinking = ThinkingMatcher(Thinking(None, (1, 2), open=True, opens=((7,),)), 9, sleeper)
    assert walk(thinking, [5, 1, 2, 5, 7, 5, 1, 2]) == [None] * 9
    assert not thinking.binds
    awake = [False, False, True, True, True, False, False, True]
    assert [wakes for _, wakes in sleeper.heard] == awake


def test_a_grammar_wakes_behind_the_marker() -> None:
    language = Language(wakes=3, shortest=1)
    grammar = ToyMatcher(language)
    budget = ThinkingMatcher(Thinking(2, MARKER, open=True), 0, grammar)
    assert walk(budget, [9, 9, 1, 2])[2:] == [1, 2, 3]
    budget.take(3)
    bound = budget.bound()
    assert bound is not None and allowed_ids(bound) == language.allowed([])
    assert budget.binds and not budget.complete
    budget.take(next(token for token in language.allowed([]) if token % 5))
    while not budget.complete:
        bound = budget.bound()
        assert bound is not None
        budget.take(allowed_ids(bound)[0])
    assert grammar.complete
