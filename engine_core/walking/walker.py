"""What follows the text of a sequence token by token, to say which tokens may come next."""

from __future__ import annotations

from typing import Protocol

from engine_core.protocol import Add
from worker.protocol import Bound


class GrammarError(Exception):
    """A text cannot be followed any further. Its message is for the client, whose request fails with 400."""


class Walker(Protocol):
    """What may come next in the text of one sequence.

    Each sequence has a walker of its own, which is asleep while any token may come. `take` gets every token
    of the answer once, in order; a sequence that is preempted keeps its walker as it keeps its tokens. `take`
    and `bound` may raise GrammarError, which ends this one request.
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


def catch_up(walker: Walker, request: Add) -> str | None:
    """Take what another engine has emitted of an answer; returns the reason if it cannot go on."""
    try:
        for token in request.tokens[request.prompt_len or len(request.tokens) :]:
            walker.take(token)
    except GrammarError as error:
        return str(error)
    return "the answer is complete, and nothing can follow it" if walker.complete else None
