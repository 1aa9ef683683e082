"""What commands write for people: text of models without control characters, progress bars, dim remarks."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from worker.host.machine import wants_plain_text
from worker.logs import printable

_PAUSE = 0.1
"""Seconds between two drawings of a bar."""
_WIDTH = 30


def safe(text: str) -> str:
    """Text of a model, without what would move a terminal's cursor or change its colours."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


class Screen:
    """Standard output and error. On a terminal, control characters are escaped and remarks are shown."""

    def __init__(self, out: TextIO | None = None, remarks: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._remarks = sys.stderr if remarks is None else remarks
        self.is_terminal = self._out.isatty()
        self._is_looked_at = self._remarks.isatty()
        # Empty with NO_COLOR, which all programs are asked to heed.
        self._dim, self._normal = ("", "") if wants_plain_text() else ("\x1b[2m", "\x1b[0m")

    def text(self, text: str) -> None:
        """Writes text of a model at once, so that a stream is seen as it comes."""
        self._out.write(safe(text) if self.is_terminal else text)
        self._out.flush()

    def thought(self, text: str) -> None:
        """Writes reasoning, which is no part of the answer: only people see it, dimmed."""
        if self.is_terminal:
            self._out.write(f"{self._dim}{safe(text)}{self._normal}")
            self._out.flush()

    def remark(self, text: str) -> None:
        """Writes a line about an answer, if somebody looks."""
        if self._is_looked_at:
            self._remarks.write(f"{self._dim}{safe(text)}{self._normal}\n")
            self._remarks.flush()


class Bar:
    """Progress of work that is counted: a bar on a terminal, and one line at the end anywhere."""

    def __init__(self, total: int, unit: str, out: TextIO | None = None) -> None:
        """`unit` is the name of one of them, whose plural ends in s."""
        self._total, self._unit = total, unit
        self._out = sys.stderr if out is None else out
        self._bar = self._out.isatty()
        self._started, self._drawn, self._done = time.monotonic(), 0.0, 0

    def add(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if self._bar and now - self._drawn >= _PAUSE:
            self._drawn = now
            self._out.write("\r\x1b[K" + self._line(now))
            self._out.flush()

    def close(self, remark: str = "") -> None:
        if self._bar:
            self._out.write("\r\x1b[K")
        seconds = time.monotonic() - self._started
        self._out.write(f"{self._done} {self._units(self._done)} in {seconds:.1f} s{remark}\n")
        self._out.flush()

    def _units(self, count: int) -> str:
        return self._unit if count == 1 else self._unit + "s"

    def _line(self, now: float) -> str:
        share = self._done / max(1, self._total)
        full = int(_WIDTH * min(1.0, share))
        rate = self._done / max(1e-9, now - self._started)
        left = (self._total - self._done) / rate if rate else 0.0
        return (
            f"{'█' * full}{'░' * (_WIDTH - full)} {self._done}/{self._total} {self._units(self._total)}, "
            f"{rate:.1f}/s, {left:.0f} s left"
        )
