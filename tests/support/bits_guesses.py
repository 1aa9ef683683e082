"""A guesser for models whose true answers are known: it guesses right and wrong tokens of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
from bits_subjects import VOCABULARY
from scripted_guesser import ScriptedGuesser, use

from engine_core.scheduling.sequence import Sequence

Truth = Callable[[int], list[int]]
"""The type of a function that returns the true answer to a request."""


class TruthGuesser(ScriptedGuesser):
    truth: Truth

    def guess(self, seq: Sequence, count: int) -> list[int]:
        done = len(seq.tokens) - seq.prompt_len
        right = self.truth(seq.id)[done : done + count]
        right += [self.random.randrange(VOCABULARY) for _ in range(count - len(right))]
        return [
            each if self.random.random() < self.chance else self.random.randrange(VOCABULARY)
            for each in right
        ]


@contextmanager
def guessing(random: Random, *, guesses: bool) -> Iterator[TruthGuesser | None]:
    """Let an engine that starts in this context guess, if its model takes guesses."""
    if not guesses:
        yield None
        return
    guesser = TruthGuesser(random, random.choice((1, 4, 8)), random.choice((0.3, 0.8, 0.95, 1.0)))
    with pytest.MonkeyPatch.context() as patch:
        use(patch, guesser)
        yield guesser
