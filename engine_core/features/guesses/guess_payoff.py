"""How many guesses pay: how often they hold, and what steps of so many rows take. It knows no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log

from engine_core.engine_stats import GuessTotals
from engine_core.features.guesses.lookup import STRONGEST
from engine_core.scheduling.step_cost import CostLine

_TRIALS, _KEPT = 16.0, 0.995
"""The trials that the first estimate of a rate is worth, and what remains of all trials after another one."""
_OWN_TRIALS, _OWN_KEPT = 4.0, 0.97
"""The same for one sequence, of which it is first believed that it is like all others."""
_MOST_RATE = 0.98

_ERROR, _GAIN, _SHARED = 0.4, 0.1, 0.5
"""The largest error (of a logarithm) of a step's time that counts, the part of it that is corrected after
many steps, and the part of this by which the times of other numbers of rows are corrected, too."""
_WEIGHT = 50
_FRESH = 16
"""After so many steps the times of all numbers of rows are fitted anew."""
_SELDOM = 4
"""One in so many steps of a number of rows that is known well is learned from."""


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


class Record:
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

    def learn(self, strength: int, record: Record | None, *, held: bool) -> None:
        """Count a guess that held or missed, of a sequence with this record."""
        all_held, tried = self._held, self._tried
        if record is not None:
            record.learn(all_held[strength] / tried[strength], held=held)
        all_held[strength] = all_held[strength] * _KEPT + held
        tried[strength] = tried[strength] * _KEPT + 1


class RowTimes:
    """Learns what a step of single tokens takes by its rows: never less for more of them.

    Positions read are counted apart, by the cost line, which also gives the first estimate. Times are learned
    for each number of rows, because on a CPU some rows more take no time until its cores have enough to do.
    More rows than any step had are believed to take as much each as all others do in the mean, so that they
    are tried if that would pay.
    """

    def __init__(self, line: CostLine, most_rows: int) -> None:
        self._line = line
        self._most_rows = most_rows
        self._seconds: dict[int, float] = {}
        """rows -> the logarithm of the seconds that they take, less `_scale`."""
        self._counts: dict[int, int] = {}
        self._scale = 0.0
        """The logarithm of how much longer all steps take than when their times were first learned."""
        self._known: list[int] = []
        self._takes: list[float] = []
        """Some numbers of rows and their seconds, between which others lie; they are fitted when needed."""
        self._curves: dict[int, list[float]] = {}
        """rows -> the seconds of so many and of more of them, as far as they were asked for."""
        self._least_chances: dict[int, float] = {}
        self._learned = 0
        """The steps that were learned since they were fitted."""
        self._passed = 0
        """The steps since the last one of a number of rows that is known well was learned."""

    @property
    def each_read(self) -> float:
        """The seconds of a position that is read."""
        return self._line.tokens(0, 1)

    def seconds(self, rows: int, reads: int) -> float:
        """What a step of so many rows takes that read so many positions."""
        if self._learned >= _FRESH or not self._known:
            self._fit()
        known, takes = self._known, self._takes
        at = min(bisect_left(known, rows), len(known) - 1)
        found = takes[at]
        if at and rows < known[at]:
            less, low = known[at - 1], takes[at - 1]
            found = low + (found - low) * (rows - less) / (known[at] - less)
        return found + self._line.tokens(0, reads)

    def curve(self, rows: int, more: int) -> list[float]:
        """What steps take that read nothing, from so many rows on to `more` rows more."""
        first = self.seconds(rows, 0)
        found = self._curves.get(rows)
        if found is None:
            found = self._curves[rows] = [first]
        while len(found) <= more:
            found.append(self.seconds(rows + len(found), 0))
        return found

    def least_chance(self, rows: int) -> float:
        """The chance with which a guess must hold to gain anything beside so many rows."""
        plain = self.seconds(rows, 0)
        least = self._least_chances.get(rows)
        if least is None:
            # Between two numbers that are known the time of each more row only rises, or only falls.
            more = [(self.seconds(rows + 1, 0) - plain) if rows < self._most_rows else plain]
            for known, takes in zip(self._known, self._takes, strict=True):
                if known > rows:
                    more.append((takes - plain) / (known - rows))
            least = self._least_chances[rows] = min(more) * rows / plain
        return least

    def learn(self, rows: int, reads: int, seconds: float) -> None:
        """Correct the times by a step that has run."""
        if seconds <= 0 or rows > self._most_rows:
            return
        count = self._counts.get(rows, 0)
        if count == _WEIGHT:
            self._passed = (self._passed + 1) % _SELDOM
            if self._passed:
                return
        found = log(max(seconds - self._line.tokens(0, reads), seconds / 4))
        if not count:
            self._seconds[rows] = log(self.seconds(rows, 0)) - self._scale
        error = found - self._seconds[rows] - self._scale
        gain = max(1 / (count + 1), _GAIN) * min(_ERROR, max(-_ERROR, error))
        self._seconds[rows] += gain * (1 - _SHARED)
        self._scale += gain * _SHARED
        self._counts[rows] = min(count + 1, _WEIGHT)
        self._learned += 1 if count else _FRESH

    def _fit(self) -> None:
        """Fit a curve that never falls, and is straight between what was learned."""
        line = self._line
        points = self._rising() or [(1, line.single)]
        (few, quick), (many, slow) = points[0], points[-1]
        each = (slow - quick) / (many - few) if many > few else line.single - line.step
        if few > 1:
            points.insert(0, (1, max(quick - each * (few - 1), quick / 2)))
        if many < self._most_rows:
            points.append((self._most_rows, slow + each * (self._most_rows - many)))
        self._known, self._takes = [rows for rows, _ in points], [seconds for _, seconds in points]
        self._least_chances, self._curves, self._learned = {}, {}, 0

    def _rising(self) -> list[tuple[int, float]]:
        """Rows and seconds of all that was learned; where more rows took less, both get their mean."""
        merged: list[tuple[float, int, list[int]]] = []
        for rows in sorted(self._seconds):
            seconds, weight, members = exp(self._seconds[rows] + self._scale), self._counts[rows], [rows]
            while merged and merged[-1][0] >= seconds:
                other, count, before = merged.pop()
                seconds = (seconds * weight + other * count) / (weight + count)
                weight, members = weight + count, before + members
            merged.append((seconds, weight, members))
        return [(rows, seconds) for seconds, _, members in merged for rows in members]
