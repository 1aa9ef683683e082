"""Reads the free text of a custom tool while the model writes it as the one string of its arguments."""

from __future__ import annotations

import json
import re

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]++|\\(?:[^u]|u[0-9a-fA-F]{4}))*+')
"""Characters of a JSON string, with escapes that are complete."""
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
"""The first half of a pair of escapes that are one character."""


class FreeText:
    """The text, from pieces of the arguments as JSON. What is in another form comes at the end, as it is."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._unread = ""
        """The end of the arguments that is not read yet."""
        self._has_begun = False

    @property
    def text(self) -> str:
        """What has been read of the text."""
        return "".join(self._pieces)

    def push(self, arguments: str) -> str:
        """More of the text, of these further arguments."""
        self._unread += arguments
        if not self._has_begun:
            if (begin := _BEGIN.match(self._unread)) is None:
                return ""
            self._unread, self._has_begun = self._unread[begin.end() :], True
        found = _WHOLE.match(self._unread)
        raw = found.group() if found else ""
        next_two = self._unread[len(raw) : len(raw) + 2]
        if (half := _HALF_PAIR.search(raw)) and "\\u".startswith(next_two):
            raw = raw[: half.start()]  # the other half may come
        self._unread = self._unread[len(raw) :]
        return self._add(json.loads(f'"{raw}"', strict=False))

    def end(self) -> str:
        """The rest of the text, now that the arguments have ended."""
        if self._has_begun:
            return ""
        try:
            found = json.loads(self._unread)
        except ValueError:
            return self._add(self._unread)
        text = found.get("input") if isinstance(found, dict) else None
        return self._add(text if isinstance(text, str) else self._unread)

    def _add(self, text: str) -> str:
        if not text.isascii():  # half of a pair alone is no character, and cannot be sent
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self._pieces.append(text)
        return text
