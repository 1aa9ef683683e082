"""Follows a value of JSON as it comes, and writes it right where a model spells it as Python does."""

from __future__ import annotations

import json
import re

_OUTSIDE = re.compile(r"[\"'{}\[\]TFN]")
"""What is looked for outside of strings: these, and the first letters of names that only Python has."""
_INSIDE = {'"': re.compile(r'["\\\x00-\x1f]'), "'": re.compile(r"[\"'\\\x00-\x1f]")}
"""What is looked for in a string, by its quote."""
_ESCAPED = '"\\/bfnrtu'
"""What may stand behind a backslash in a string of JSON."""


class JsonSpan:
    """Follows one JSON object or array, which is never looked at twice. It does not check what is between."""

    __slots__ = ("_depth", "_drops", "_escaped", "_mended", "_quote")

    def __init__(self) -> None:
        self._mended: list[tuple[int, str]] = []
        """The places of characters that JSON does not have there, in the piece that was looked at last, and
        what stands for each."""
        self._depth = 0
        self._quote = ""
        """The quote of the string that has begun."""
        self._escaped = False
        self._drops = False
        """Whether the rest of a name, for which null is written, is left out."""

    def end_in(self, text: str) -> int | None:
        """The index behind the value's end, if it is in this next piece of text."""
        self._mended.clear()
        at = self._drop(text, 0) if self._drops else 0
        if self._escaped and text:
            self._mend_escaped(text[0], 0)
            at, self._escaped = 1, False
        while found := (_INSIDE[self._quote] if self._quote else _OUTSIDE).search(text, at):
            at = found.end()
            match found.group():
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
                case "\\":
                    if at == len(text):
                        self._escaped = True
                    else:
                        self._mend_escaped(text[at], at)
                    at += 1
                case '"' | "'" as quote if self._quote in ("", quote):
                    self._quote = "" if self._quote else quote
                    if quote == "'":
                        self._mended.append((found.start(), '"'))
                case "T" | "F" as first:
                    self._mended.append((found.start(), first.lower()))
                case "N":  # None, or NaN
                    self._mended.append((found.start(), "null"))
                    at = self._drop(text, at)
                case other:
                    self._mended.append((found.start(), json.dumps(other)[1:-1]))
        return None

    def _drop(self, text: str, at: int) -> int:
        """Leaves out the rest of a name; returns where it ends."""
        while at < len(text) and text[at].isalpha():
            self._mended.append((at, ""))
            at += 1
        self._drops = at == len(text)
        return at

    def _mend_escaped(self, char: str, at: int) -> None:
        r"""See to it that a character behind a backslash makes an escape: `\d` stands for `\\d`."""
        if char == self._quote == "'":
            self._mended.append((at, "u0027"))
        elif char not in _ESCAPED:
            self._mended.append((at, "\\" + json.dumps(char, ensure_ascii=False)[1:-1]))

    def mended(self, text: str) -> str:
        """The piece that was looked at last, or its beginning, as JSON has it: models write line ends in
        strings as they are, single backslashes, and Python's quotes and names."""
        pieces, begin = list[str](), 0
        for at, written in self._mended:
            pieces += text[begin:at], written
            begin = at + 1
        return "".join([*pieces, text[begin:]])
