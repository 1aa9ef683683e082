"""How long answers get, learned from those that have ended, and when running ones will have ended."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from engine_core.scheduling.sequence import Sequence

_PRIOR = 100.0
"""The tokens of an answer while none has ended."""
_KEPT = 0.95
"""What counts of all answers before when another one ends."""


class AnswerLengths:
    """Expects each token of an answer to be its last with the same chance, up to the limit of the request.

    So an answer that runs for long is evidence too, before it ends.
    """

    def __init__(self) -> None:
        self._tokens = _PRIOR
        self._stops = 1.0

    def learn(self, tokens: int, *, stopped: bool) -> None:
        """Count an answer of so many tokens. `stopped`: it ended before the limit of its request."""
        self._tokens = _KEPT * self._tokens + tokens
        self._stops = _KEPT * self._stops + stopped

    def stop_rate(self, running: Iterable[Sequence]) -> float:
        """The chance of a token to be the last of its answer."""
        return self._stops / (self._tokens + sum([len(seq.tokens) - seq.prompt_len for seq in running]))


def steps_until_ends(count: int, running: Iterable[Sequence], stop_rate: float) -> float:
    """The steps until so many of the running sequences have ended."""
    sure: list[float] = []
    stopping: list[int] = []
    for seq in running:
        if seq.may_stop:
            stopping.append(seq.left)
        else:
            sure.append(seq.left)
    every = len(stopping)
    for place, most in enumerate(sorted(stopping)):
        # The usual time until so many of several have ended that end by chance.
        sure.append(min(most, -log(1 - (place + 0.5) / every) / stop_rate))
    return sorted(sure)[count - 1]
