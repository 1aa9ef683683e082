"""Figures for a terminal: a progress bar during the run, then a table with a column for each load."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from typing import TextIO

from server.bench.load.endpoints import Outcome
from server.bench.summary import Figures, Spread

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between chunks",
    "e2el": "time to the end",
}
_SECONDS_BETWEEN = 0.1


class Bar:
    """A progress bar: one line that is overwritten; silent where the output is no terminal."""

    def __init__(
        self, title: str, total: int | None, seconds: float | None, out: TextIO = sys.stderr
    ) -> None:
        self._title, self._total, self._seconds, self._out = title, total, seconds, out
        self._shown = out.isatty()
        self._started = time.monotonic()
        self._last = 0.0
        self._done = self._failed = self._tokens = 0

    def add(self, outcome: Outcome) -> None:
        self._done += 1
        self._failed += outcome.error is not None
        self._tokens += outcome.output_tokens or outcome.input_tokens
        now = time.monotonic()
        if self._shown and now - self._last >= _SECONDS_BETWEEN:
            self._last = now
            self._out.write("\r\x1b[K" + self.line(now - self._started))
            self._out.flush()

    def close(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def line(self, passed: float) -> str:
        parts = [self._done / self._total] if self._total else []
        parts += [passed / self._seconds] if self._seconds else []
        full = int(24 * min(1.0, max(parts, default=0.0)))
        failed = f", {self._failed} failed" if self._failed else ""
        count = f"{self._done}/{self._total}" if self._total else str(self._done)
        rate = self._tokens / max(passed, 1e-9)
        return f"{self._title}  {'█' * full}{'░' * (24 - full)} {count} requests{failed}, {rate:.0f} tokens/s"


def table(points: Sequence[Figures], shown: Collection[str]) -> str:
    rows: list[list[str]] = [["", *(point.name for point in points)]]

    def add(title: str, values: Sequence[float | None], form: str) -> None:
        if any(value is not None for value in values):
            rows.append([title, *("" if value is None else format(value, form) for value in values)])

    add("requests done", [p.completed for p in points], "d")
    add("requests failed", [p.failed for p in points], "d")
    add("seconds", [p.seconds for p in points], ".2f")
    add("requests/s", [p.requests_per_second for p in points], ".2f")
    if any(p.inputs != p.completed for p in points):
        add("inputs/s", [p.inputs_per_second for p in points], ".1f")
    if any(p.output_tokens for p in points):
        add("output tokens/s", [p.output_tokens_per_second for p in points], ".1f")
    add("tokens/s, in and out", [p.total_tokens_per_second for p in points], ".1f")
    for metric, title in _TITLES.items():
        spreads: list[Spread | None] = [getattr(p, metric) for p in points]
        if metric not in shown or not any(spreads):
            continue
        rows.append([f"{title}, ms ({metric.upper()})"])
        add("  mean", [s and s.mean for s in spreads], ".2f")
        for name in next(s for s in spreads if s is not None).percentiles:
            label = "median" if name == "p50" else name
            add(f"  {label}", [s and s.percentiles[name] for s in spreads], ".2f")
    return "\n".join([*aligned(rows), *_failures(points)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    first = max(len(row[0]) for row in rows)
    width = max((len(cell) for row in rows for cell in row[1:]), default=0) + 3
    return [row[0].ljust(first) + "".join(cell.rjust(width) for cell in row[1:]) for row in rows]


def _failures(points: Sequence[Figures]) -> list[str]:
    return [
        f"{point.name}: {failure.count} x {failure.kind}"
        + (f": {failure.example}" if failure.example else "")
        for point in points
        for failure in point.failures
    ]
