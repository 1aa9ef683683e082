"""Ends an answer whose tail repeats itself, if its request asks for that."""

from __future__ import annotations

import msgspec

from server.errors import invalid

MOST_PATTERN = 1024
"""The largest pattern that may be looked for: the work for a token is bounded by it."""


class RepetitionDetectionParams(msgspec.Struct):
    """When the tail of an answer counts as a loop, with vLLM's fields: at least `min_count` copies of one
    pattern of tokens, of `min_pattern_size` to `max_pattern_size` tokens, one behind another."""

    max_pattern_size: int = 0
    """0 looks for nothing."""
    min_pattern_size: int = 0
    """0 is 1."""
    min_count: int = 0

    def check(self) -> None:
        """Raises BadRequest if the numbers do not go together."""
        least, most, count = self.min_pattern_size, self.max_pattern_size, self.min_count
        if not 0 <= most <= MOST_PATTERN:
            self._refuse("max_pattern_size", f"in [0, {MOST_PATTERN}]", most)
        if not 0 <= least <= most:
            self._refuse("min_pattern_size", f"in [0, {most}], the last being max_pattern_size", least)
        if most and count < 2:
            self._refuse("min_count", "at least 2", count)

    def _refuse(self, field: str, rule: str, value: int) -> None:
        name = f"repetition_detection.{field}"
        raise invalid(name, f"{name} must be {rule}, got {value}.", value)


class LoopFinder:
    """Looks at the tokens of an answer, one by one, for a tail that repeats itself."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._least, self._most = max(1, params.min_pattern_size), params.max_pattern_size
        self._repeats = params.min_count - 1
        self._places: dict[int, list[int]] = {}
        """The positions of each token."""
        self._count = 0
        self._runs: dict[int, int] = {}
        """How many of the last tokens are those that stand so many tokens before them, by that distance."""

    def push(self, token: int) -> bool:
        """Takes the next token. Returns whether the tail now ends with enough copies of a pattern."""
        places, runs = self._places.setdefault(token, []), dict[int, int]()
        for place in reversed(places):
            if (size := self._count - place) > self._most:
                break
            runs[size] = self._runs.get(size, 0) + 1
        places.append(self._count)
        self._count, self._runs = self._count + 1, runs
        return any(run >= size * self._repeats for size, run in runs.items() if size >= self._least)
