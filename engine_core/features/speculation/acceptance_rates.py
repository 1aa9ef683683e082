"""Learns how often guesses hold, for all sequences together and for each one."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.engine_stats import GuessTotals
from engine_core.features.speculation.ngram_lookup import STRONGEST

_TRIALS, _KEPT = 16.0, 0.995
"""The trials that the first estimate of a rate is worth, and what remains of all trials after another one."""
_OWN_TRIALS, _OWN_KEPT = 4.0, 0.97
"""The same for one sequence, of which it is first believed that it is like all others."""
_MOST_RATE = 0.98


class DraftCounts:
    """Counts drafts and what became of their guesses, for statistics."""

    def __init__(self, most: int) -> None:
        """`most`: the most guesses of a draft."""
        self._drafts = self._guessed = 0
        self._held = [0] * most

    def add(self, guessed: int, held: int) -> None:
        """Count a draft of which so many guesses held."""
        self._drafts += 1
        self._guessed += guessed
        for at in range(held):
            self._held[at] += 1

    @property
    def totals(self) -> GuessTotals:
        return GuessTotals(self._drafts, self._guessed, list(self._held))


class AcceptanceRecord:
    """Tells how much better the guesses for one sequence hold than those for all, the latest most of all."""

    __slots__ = ("_expected", "_held", "_missed", "_unexpected")

    def __init__(self) -> None:
        self._held = self._expected = self._missed = self._unexpected = _OWN_TRIALS

    def learn(self, rate: float, *, held: bool) -> None:
        """Count a guess that held or missed, and holds at this rate for all sequences."""
        kept = _OWN_KEPT
        self._held = self._held * kept + held
        self._expected = self._expected * kept + rate
        self._missed = self._missed * kept + (not held)
        self._unexpected = self._unexpected * kept + 1 - rate

    @property
    def odds(self) -> float:
        """The factor of the odds that a guess holds."""
        smooth = _OWN_TRIALS
        more = (self._held + smooth) / (self._expected + smooth)
        return more * (self._unexpected + smooth) / (self._missed + smooth)


_OF_MATCHES = [max(0.1, 1 - 1.2 * max(strength, 1) ** -0.6) for strength in range(STRONGEST + 1)]
"""The rates that are believed at first. A few tokens that repeat by chance, as in short chats, are not
trusted: a text that truly repeats itself shows that within some tokens."""


class Acceptance:
    """Learns how often a guess holds, by the strength of the match that it comes from."""

    def __init__(self, first: Sequence[float] = _OF_MATCHES) -> None:
        """`first` are the rates that are believed before anything is known."""
        self._held = [_TRIALS * rate for rate in first]
        self._tried = [_TRIALS] * len(first)

    def rate(self, strength: int, odds: float = 1.0) -> float:
        """The chance that a guess holds, of a sequence with this factor of the odds."""
        rate = self._held[strength] / self._tried[strength]
        return min(_MOST_RATE, rate * odds / (1 - rate + rate * odds))

    def chances(self, strength: int, odds: float, count: int, least: float) -> list[float]:
        """The chances of the next guesses to hold with all before them, but for those under the least."""
        found: list[float] = []
        chance, all_held, tried = 1.0, self._held, self._tried
        for each in range(strength, strength + count):
            at = each if each < STRONGEST else STRONGEST
            held = all_held[at] * odds
            rate = held / (tried[at] - all_held[at] + held)  # as `rate` has it
            chance *= rate if rate < _MOST_RATE else _MOST_RATE
            if chance < least:
                break
            found.append(chance)
        return found

    def learn(self, strength: int, record: AcceptanceRecord | None, *, held: bool) -> None:
        """Count a guess that held or missed, of a sequence with this record."""
        all_held, tried = self._held, self._tried
        if record is not None:
            record.learn(all_held[strength] / tried[strength], held=held)
        all_held[strength] = all_held[strength] * _KEPT + held
        tried[strength] = tried[strength] * _KEPT + 1
