"""The work that is before the engine, of one owner or of all."""

from __future__ import annotations

from engine_core.rates import expected_length
from engine_core.scheduling.queue.classes import WorkClass


class Backlog:
    """Prompts that are not computed, and answers to sequences that wait."""

    __slots__ = ("_most", "_open", "_sure", "prompts")

    def __init__(self) -> None:
        self.prompts = [0.0] * len(WorkClass)
        """The seconds that the uncomputed prompts of each class will take."""
        self._sure = self._open = self._most = 0

    def add_answer(self, most: int, *, may_stop: bool, sign: int = 1) -> None:
        """Count an answer of so many tokens at most; with the sign -1, count it no more."""
        if may_stop:
            self._open += sign
            self._most += sign * most
        else:
            self._sure += sign * most

    def answers(self, stop_rate: float) -> float:
        """The tokens that the answers will have, if each stops with this chance after each token."""
        if not self._open:
            return float(self._sure)
        return self._sure + self._open * expected_length(self._most / self._open, stop_rate)
