"""Finds where a JSON value ends in text that comes in pieces."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonSpan:
    """Follows one JSON object or array, which is never looked at twice. It does not check what is between."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def in_string(self) -> bool:
        return self._in_string

    def end_in(self, text: str, start: int = 0) -> int | None:
        """The index behind the value's end, if it is in this next piece of text (from `start` on)."""
        at = start
        if self._escaped and at < len(text):
            at, self._escaped = at + 1, False
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(text, at):
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    if at == len(text):
                        self._escaped = True
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None
