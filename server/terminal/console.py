"""The parts that commands of the terminal share: parsers of options, a screen, tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from server.options.option_parsing import OptionError, Parser
from worker.host.machine import wants_plain_text
from worker.logs import printable


class CommandError(Exception):
    """A command cannot do what it was asked for; the text is for the user."""

    exit_code = 1


def parser_of(command: str, description: str, usage: str = "[options]") -> Parser:
    return Parser(prog=command, usage=f"{command} {usage}", description=description, allow_abbrev=False)


def check_folder(flag: str, path: str | None) -> None:
    """Refuses an output that could not be written, before work begins."""
    if path is not None and not Path(path).parent.is_dir():
        raise OptionError(f"{flag} {path}: there is no folder {Path(path).parent}; make it first")


def safe_text(text: str) -> str:
    """Text of a model, without what would move a terminal's cursor or change its colours."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


class Screen:
    """Standard output and error. On a terminal, control characters are escaped and remarks are shown."""

    def __init__(self, out: TextIO | None = None, remarks: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._remarks = sys.stderr if remarks is None else remarks
        self.is_terminal = self._out.isatty()
        # Empty with NO_COLOR, which all programs are asked to heed.
        self._dim, self._normal = ("", "") if wants_plain_text() else ("\x1b[2m", "\x1b[0m")

    def text(self, text: str) -> None:
        """Writes text of a model at once, so that a stream is seen as it comes."""
        self._out.write(safe_text(text) if self.is_terminal else text)
        self._out.flush()

    def reasoning(self, text: str) -> None:
        """Writes reasoning, which is no part of the answer: only people see it, dimmed."""
        if self.is_terminal:
            self._write_dimmed(self._out, text)

    def remark(self, text: str) -> None:
        """Writes a line about an answer, if a person reads it."""
        if self._remarks.isatty():
            self._write_dimmed(self._remarks, text, "\n")

    def _write_dimmed(self, out: TextIO, text: str, end: str = "") -> None:
        out.write(f"{self._dim}{safe_text(text)}{self._normal}{end}")
        out.flush()


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
