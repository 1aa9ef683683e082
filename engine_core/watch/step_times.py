"""The time within which nearly all steps of a size end: what is far beyond it will most likely never end."""

from __future__ import annotations

_UP = 1.1
_DOWN = _UP ** (-1 / 99)
"""A time that grows so after each step that takes longer, and shrinks so after each other one, stays near the
one within which 99 of 100 steps end. One step that stood still for an hour moves it by a tenth."""


class StepTimes:
    """The 99th percentile of the seconds of steps, by their new tokens in powers of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def usual(self, tokens: int, expected: float) -> float:
        """The seconds within which a step ends of which so many were expected when it was planned."""
        return max(expected, self._seconds.get(tokens.bit_length(), 0.0))

    def learn(self, tokens: int, expected: float, seconds: float) -> None:
        """Correct the time of a size by a step that has ended."""
        size = tokens.bit_length()
        known = self._seconds.get(size, expected)
        self._seconds[size] = known * (_UP if seconds > known else _DOWN)
