"""Calls that a family writes in one of two ways, told apart by their first character."""

from __future__ import annotations

from dataclasses import dataclass

from server.answers.calls import Calls
from server.answers.dialect import CallFormat
from server.answers.source import Reading


@dataclass(frozen=True, slots=True)
class Either:
    first: str
    """The first character of what `format` reads."""
    format: CallFormat
    other: CallFormat

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        next_char = yield from calls.source.peek()
        yield from (self.format if next_char == self.first else self.other).read(calls, opener)
