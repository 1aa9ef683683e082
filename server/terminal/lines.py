"""Messages that are typed on a terminal, or come through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from server.options.reader import OptionError

_QUOTES = '"""'


def piped() -> str:
    """All of standard input, which is one message."""
    text = sys.stdin.read()
    if not text.strip():
        raise OptionError("standard input is empty: give a text through a pipe, or with --quick")
    return text


class Lines:
    '''Yields what is typed until Ctrl-D: one line each, or several between lines that are """.

    A line that ends with a backslash goes on in the next one.
    '''

    def __init__(self, read: Callable[[str], str] = input) -> None:
        self._read = read
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() editing and the lines before

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                message = self._message()
            except EOFError:
                print()
                return
            if message.strip():
                yield message

    def _message(self) -> str:
        line = self._read("> ")
        if line.strip().startswith(_QUOTES):
            return self._quoted(line.strip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read("… "))
        return "\n".join(lines)

    def _quoted(self, first: str) -> str:
        lines = [first] if first else []
        while not (lines and lines[-1].endswith(_QUOTES)):
            lines.append(self._read("… "))
        lines[-1] = lines[-1].removesuffix(_QUOTES)
        return "\n".join(lines).rstrip("\n")
