"""Computes `Retry-After`: the seconds until engines have computed what is in the server."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

from engine_core.engine_stats import Rates, Stats

FIRST_GUESS = 5
"""Seconds to wait, while no engine has said how fast it is."""
MAX_WAIT = 3600


class Waiting(Protocol):
    """An owner's requests that are in the server, as tokens that the engine has yet to compute."""

    weight: float
    prompts: int
    answers: float


def seconds_until_done(stats: Stats | None, owners: Collection[Waiting], own: Waiting | None) -> int:
    """Tell in how many seconds all owners' requests are computed, or those of `own` at its share."""
    if stats is None or stats.rates is None:
        return FIRST_GUESS
    seconds = _seconds(owners, stats.rates)
    if own is not None:
        weights = sum([each.weight for each in owners])
        seconds = min(seconds, _seconds([own], stats.rates) * weights / own.weight)
    return whole_seconds(seconds)


def whole_seconds(seconds: float) -> int:
    return max(1, min(MAX_WAIT, math.ceil(seconds)))


def _seconds(owners: Collection[Waiting], rates: Rates) -> float:
    """The time that an engine of these rates takes for all that these have here."""
    return rates.seconds(sum([each.prompts for each in owners]), sum([each.answers for each in owners]))
