"""When a request that arrives now gets its first answer, from the work before it and the share of its
class."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engine_core.scheduling.queue.classes import WEIGHTS, WorkClass

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
    """The uncomputed prompts of each class."""


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
