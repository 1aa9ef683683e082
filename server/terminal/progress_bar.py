"""Shows progress: of the start, as a bar on a terminal or plain lines in a log file, and of counted work."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from worker.logs import printable

STAGES = {
    "download": "Downloading the model",
    "import": "Loading libraries",
    "weights": "Loading weights",
    "cache": "Allocating the cache",
    "warmup": "Warming up",
}
_SECONDS_BETWEEN_DRAWINGS = 0.1


class ProgressDisplay:
    def __init__(self, out: TextIO | None = None, *, silent: bool = False) -> None:
        """`out` is where to show it, stderr if there is none: as it is now, so call logs.setup() before."""
        self.silent = silent
        """Whether nothing is shown, not even lines at the end."""
        self._out = out or sys.stderr
        self._bar = self._out.isatty()
        self._stage = ""
        self._started = time.monotonic()

    def show(self, stage: str, fraction: float, detail: str = "") -> None:
        """Shows a stage and how far it is. `detail` names several engines and workers, on a terminal only."""
        title = STAGES.get(stage)
        if title is None:
            return
        if self._bar:
            # Other lines are written here too: over a bar, behind which the cursor goes back, or after it.
            self._write("\r\x1b[K" + (self._line(title, fraction, detail) + "\r" if fraction < 1 else ""))
        elif stage != self._stage:
            self._write(f"{title} ({time.monotonic() - self._started:.1f} s)\n")
        self._stage = stage

    def done(self, line: str | None = None) -> None:
        if self._bar and self._stage:
            self._write("\r\x1b[K")
        if line is not None:
            self._write("\n".join(map(printable, line.split("\n"))) + "\n")
        self._stage = ""

    def _write(self, text: str) -> None:
        if self.silent:
            return
        with suppress(OSError):  # a program that uses the library may have a stderr on a full disk
            self._out.write(text)
            self._out.flush()

    def _line(self, title: str, fraction: float, detail: str) -> str:
        columns = shutil.get_terminal_size().columns
        width = max(10, min(40, columns - len(title) - len(detail) - 20))
        line = f"{title}  {bar_of_blocks(fraction, width)} {fraction:4.0%}"
        return f"{line}  {detail}"[: columns - 1] if detail else line


class StatusLine:
    """The last line of a terminal, which is overwritten; nothing is shown where the output is no terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = sys.stderr if out is None else out
        self._is_shown = self.out.isatty()
        self._started, self._drawn = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def draw(self, line: Callable[[float], str]) -> None:
        """Shows the line that belongs to the seconds passed, unless another was drawn just now."""
        now = time.monotonic()
        if self._is_shown and now - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
            self._drawn = now
            self._write(line(now - self._started))

    def clear(self) -> None:
        if self._is_shown:
            self._write("")

    def _write(self, text: str) -> None:
        self.out.write("\r\x1b[K" + text)
        self.out.flush()


def bar_of_blocks(share: float, width: int) -> str:
    """A bar of which this share is full."""
    full = int(width * min(1.0, max(0.0, share)))
    return "█" * full + "░" * (width - full)


class ProgressBar:
    """Progress of work that is counted: a bar on a terminal, which is gone after its block, or when it is
    closed, with one line anywhere."""

    def __init__(
        self, total: int, unit: str, out: TextIO | None = None, *, title: str = "", shows: bool = True
    ) -> None:
        """`unit` is the name of one of them, whose plural ends in s. One that `shows` nothing only counts."""
        self._total, self._unit, self._title, self._done = total, unit, title and f"{title}  ", 0
        self._status = StatusLine(out)
        self._shows = shows

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._status.clear()

    def add(self, count: int = 1) -> None:
        self._done += count
        if self._shows:
            self._status.draw(self._line)

    def close(self, remark: str = "") -> None:
        self._status.clear()
        self._status.out.write(f"{self._units(self._done)} in {self._status.seconds:.1f} s{remark}\n")
        self._status.out.flush()

    def _units(self, count: int) -> str:
        return f"{count} {self._unit}" if count == 1 else f"{count} {self._unit}s"

    def _line(self, seconds: float) -> str:
        rate = self._done / max(1e-9, seconds)
        left = (self._total - self._done) / rate if rate else 0.0
        bar = bar_of_blocks(self._done / max(1, self._total), 30)
        return f"{self._title}{bar} {self._done}/{self._units(self._total)}, {rate:.1f}/s, {left:.0f} s left"
