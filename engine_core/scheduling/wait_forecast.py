"""When a request that arrives now gets its first answer, from the work before it and the share of its class.

How long answers get is learned from those that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log

from engine_core.scheduling.queue.work_classes import WEIGHTS, WorkClass
from engine_core.scheduling.sequence import Sequence

_PRIOR = 100.0
"""The tokens of an answer while none has ended."""
_KEPT = 0.95
"""What counts of all answers before when another one ends."""
_NOTHING = 1e-9
"""Seconds of work that are left of sums and differences of others."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do at a moment. All times are in seconds."""

    in_flight: float
    """The time until the steps that are planned have landed."""
    every_step: float
    """The time that each step takes for itself and for decoding rows."""
    for_prompts: float
    """The part of each step that prompts and texts get at most."""
    backlog: tuple[float, ...]


def expected_wait(load: Load, work_class: WorkClass, least_steps: float = 0.0) -> float:
    """The seconds until all that now waits in this class is computed, after so many steps at least."""
    busy = {each for each in WorkClass if load.backlog[each] > _NOTHING} | {work_class}
    share = WEIGHTS[work_class] / sum(WEIGHTS[each] for each in busy)
    ahead = load.backlog[work_class]
    others = sum(load.backlog) - ahead
    # While others wait as well, this class gets its share; what they leave of it, it gets too.
    mixed = min(others, ahead * (1 / share - 1))
    steps = max(1, ceil((ahead + mixed) / load.for_prompts))
    computed = min(ahead + others, steps * load.for_prompts)  # the last step is as full as all can make it
    return load.in_flight + max(steps, least_steps) * load.every_step + computed


class AnswerLengths:
    """Expects each token of an answer to be its last with the same chance. Running answers count, too."""

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
