"""Shows the progress of the start: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from typing import TextIO

from worker.logs import printable

STAGES = {
    "download": "Downloading the model",
    "import": "Loading libraries",
    "weights": "Loading weights",
    "cache": "Allocating the cache",
    "warmup": "Warming up",
    "generate": "Generating",
    "pool": "Pooling",
}


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
        full = int(width * min(1.0, max(0.0, fraction)))
        line = f"{title}  {'█' * full}{'░' * (width - full)} {fraction:4.0%}"
        return f"{line}  {detail}"[: columns - 1] if detail else line
