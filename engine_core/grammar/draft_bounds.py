"""Guesses of the next tokens of a text that a matcher follows: which of them fit, and the bounds behind each.

Both follow the guesses with a fork of the matcher. The matcher itself takes only the tokens that are sampled,
so nothing has to be taken back where guesses do not hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.grammar.matcher import GrammarError, TokenMatcher, allows
from worker.protocol import Bound


def count_fitting(matcher: TokenMatcher, guesses: Sequence[int]) -> int:
    """The number of leading guesses that fit, and behind which the text goes on."""
    ahead = matcher.fork()
    for count, guess in enumerate(guesses):
        try:
            ahead.take(guess)
        except GrammarError:
            return count
        if ahead.complete:
            return count
    return len(guesses)


def find_bounds(matcher: TokenMatcher, guesses: Sequence[int]) -> list[Bound | None]:
    """What may be sampled next, and then behind each of these guesses, which have been found to fit.

    It ends early where a guess cannot hold, or cannot be followed: what comes behind that must not count.
    Raises GrammarError if nothing can be said of the next token.
    """
    bounds = [matcher.bound()]
    if not guesses:
        return bounds
    ahead = matcher.fork()
    try:
        for guess in guesses:
            if not allows(bounds[-1], guess):
                break
            ahead.take(guess)
            bounds.append(ahead.bound())
    except GrammarError:
        pass  # the matcher itself meets the same error when the tokens before it have been sampled
    return bounds
