"""Calls that a family writes in one of two ways, told apart by their first character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.answers.calls import Calls
from server.answers.dialect import CallFormat
from server.answers.source import Reading
from server.grammars.tool_grammar import Lark, ToolForm
from server.text.detokenizer import is_mark


@dataclass(frozen=True, slots=True)
class Either:
    first: str
    """The first character of what `format` reads."""
    format: CallFormat
    other: CallFormat
    other_by: str = ""
    """The special token of vocabularies whose models write as `other` reads."""

    def _written(self) -> CallFormat:
        """The way in which a model writes whose tokens are known: the one that needs the most of them."""
        return self.other if self.other_by and is_mark(self.other_by) else self.format

    def holds_several(self, opener: str) -> bool:
        return self._written().holds_several(opener)

    def write(self, lark: Lark, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        return self._written().write(lark, tools, opener, several)

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        next_char = yield from calls.source.peek()
        yield from (self.format if next_char == self.first else self.other).read(calls, opener)
