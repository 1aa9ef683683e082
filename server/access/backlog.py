"""The work that admitted requests still are for the engine, in tokens, and the time that it takes."""

from __future__ import annotations

from typing import NamedTuple

from engine_core.rates import Rates, expected_length


class Work(NamedTuple):
    """One choice, or texts to be pooled."""

    prompt: int
    """Tokens to read."""
    most: int = 0
    """Tokens of the longest answer."""
    may_stop: bool = False
    """Whether the answer may end before."""


class Backlog:
    """The work of one owner: what waits for its first token, and what has begun."""

    __slots__ = ("_begun_most", "_begun_open", "_begun_sure", "_most", "_open", "_sure", "prompts")

    def __init__(self) -> None:
        self.prompts = 0
        """Tokens of prompts and texts that wait."""
        self._sure = self._open = self._most = 0
        self._begun_sure = self._begun_open = self._begun_most = 0

    def add(self, work: Work, sign: int = 1) -> None:
        """Count work that waits; with -1, count it no more."""
        self.prompts += sign * work.prompt
        if work.may_stop:
            self._open += sign
            self._most += sign * work.most
        else:
            self._sure += sign * work.most

    def add_begun(self, work: Work, sign: int = 1) -> None:
        """Count work whose prompt is computed; with -1, count it no more."""
        if work.may_stop:
            self._begun_open += sign
            self._begun_most += sign * work.most
        else:
            self._begun_sure += sign * work.most

    def answers(self, stop_rate: float) -> float:
        """The tokens of answers that are still expected. Answers that have begun are half done."""
        waiting = self._sure + _expected(self._open, self._most, stop_rate)
        begun = self._begun_sure + _expected(self._begun_open, self._begun_most, stop_rate)
        return waiting + begun / 2


def _expected(number: int, most: int, stop_rate: float) -> float:
    """The tokens of so many answers that may stop, and have so many tokens together at most."""
    return number * expected_length(most / number, stop_rate) if number else 0.0


def seconds_of(backlogs: list[Backlog], rates: Rates) -> float:
    """The time that an engine of these rates takes for all of this."""
    prompts = sum([each.prompts for each in backlogs])
    return rates.seconds(prompts, sum([each.answers(rates.stop_rate) for each in backlogs]))
