"""The parts that commands of the terminal share: parsers of options, a screen, a check of answers, tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO
from unicodedata import combining, east_asian_width

from server.options.option_parsing import OptionError, Parser
from worker.host.machine import wants_plain_text
from worker.logs import printable

_LEAST, _TIMES, _LONGEST = 500, 4, 1000
"""An answer repeats itself if its last characters are one passage over and over: so many characters, and so
many times, of a passage of at most so many characters."""
_MARK = 16
"""Characters at the end that are looked for before it."""


class CommandError(Exception):
    """A command cannot do what it was asked for; the text is for the user."""

    exit_code = 1


def parser_of(command: str, description: str, usage: str = "[options]") -> Parser:
    return Parser(prog=command, usage=f"{command} {usage}", description=description, allow_abbrev=False)


def check_folder(flag: str, path: str | None) -> None:
    """Refuses an output that could not be written, before work begins."""
    if path is not None and not Path(path).parent.is_dir():
        raise OptionError(f"{flag} {path}: there is no folder {Path(path).parent}; make it first")


def read_standard_input() -> str:
    """All of standard input. Raises OptionError if it is not text in the encoding of this terminal."""
    try:
        text = sys.stdin.read()
        text.encode()  # fails where Python has let bytes pass that are none
    except UnicodeError:
        raise OptionError(f"standard input is not text in {sys.stdin.encoding.upper()}") from None
    return text


def safe_text(text: str) -> str:
    """Text of a model, without what would move a terminal's cursor or change its colours."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


class Screen:
    """Standard output and error. On a terminal, control characters are escaped and remarks are shown."""

    def __init__(self, out: TextIO | None = None, remarks: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._remarks = sys.stderr if remarks is None else remarks
        self.is_terminal = self._out.isatty()
        self._lines = _Lines()
        # Empty with NO_COLOR, which all programs are asked to heed.
        self._dim, self._normal = ("", "") if wants_plain_text() else ("\x1b[2m", "\x1b[0m")

    def text(self, text: str) -> None:
        """Writes text of a model at once, so that a stream is seen as it comes."""
        self._out.write(self._lines.broken(safe_text(text)) if self.is_terminal else text)
        self._out.flush()

    def reasoning(self, text: str) -> None:
        """Writes reasoning, which is no part of the answer: only people see it, dimmed."""
        if self.is_terminal:
            self._write_dimmed(self._out, self._lines.broken(safe_text(text)))

    def remark(self, text: str) -> None:
        """Writes a line about an answer, if a person reads it."""
        if self._remarks.isatty():
            self._write_dimmed(self._remarks, safe_text(text), "\n")

    def _write_dimmed(self, out: TextIO, text: str, end: str = "") -> None:
        out.write(f"{self._dim}{text}{self._normal}{end}")
        out.flush()


class _Lines:
    """Breaks lines between words, in a text that comes in pieces. Those of code stay as they are."""

    def __init__(self) -> None:
        self._line = ""
        """What stands in the last line."""
        self._is_code = False

    def broken(self, text: str) -> str:
        """The piece as it is written. A word that does not fit is deleted where it began, and moved."""
        columns, shown = shutil.get_terminal_size().columns, list[str]()
        for c in text:
            head, _, word = self._line.rpartition(" ")
            if c == "\n":
                self._is_code ^= self._line.lstrip().startswith("```")
                self._line = ""
            elif self._is_code or _width(self._line + c) < columns:
                self._line += c
            elif c == " ":
                self._line, c = "", "\n"
            elif not head.strip():
                self._line = ""  # one word fills the line, and the terminal breaks it
            else:
                self._line = word + c
                c = f"\x1b[{_width(word)}D\x1b[K\n{self._line}" if word else f"\n{c}"
            shown.append(c)
        return "".join(shown)


def _width(text: str) -> int:
    """The columns of a text on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


class RepetitionGuard:
    """Notices that an answer which is streamed repeats itself, as those of small models may without end."""

    def __init__(self) -> None:
        self._end = ""
        self._new = 0

    def repeated(self, text: str) -> int:
        """Adds text; returns how many of the last characters only repeat what stands before them."""
        self._end = (self._end + text)[-_LONGEST * (_TIMES + 1) :]
        self._new += len(text)
        if self._new < _MARK:
            return 0
        self._new, end, mark = 0, self._end, self._end[-_MARK:]
        at = end.rfind(mark, 0, -1)
        while at >= 0 and (period := len(end) - _MARK - at) <= _LONGEST:
            count = period * max(_TIMES, -(-_LEAST // period))
            if len(end) >= count + period and end[-count:] == end[-count - period : -period]:
                return count
            at = end.rfind(mark, 0, at + _MARK - 1)
        return 0


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of texts, whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of figures: its first column to the left, all others to the right."""
    first = max(len(row[0]) for row in rows)
    width = max((len(cell) for row in rows for cell in row[1:]), default=0) + 3
    return [row[0].ljust(first) + "".join(cell.rjust(width) for cell in row[1:]) for row in rows]
