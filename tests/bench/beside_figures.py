"""Figures of streams beside other work: samples of each side, spreads of them, ratios, and a table.

The JSON result has the form of these structs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from server.bench.endpoints import Outcome
from server.bench.load_generator import FORMAT, Spread, spread
from server.terminal.console import aligned

_TITLES = {
    "gaps": "time between chunks, ms",
    "ttft": "time to first token of a stream, ms",
    "prompt_ttft": "time to first token of the long prompt, ms",
    "latency": "time to a single text's vector, ms",
    "lateness": "lateness of the reader's own timers, ms",
}
"""The metrics that have a spread."""
_FEW = ("ttft", "prompt_ttft")
"""Metrics of which a round gives too few for percentiles."""
_TEXT_RATE = "texts/s"


@dataclass(slots=True)
class Samples:
    """Times in seconds of one side, alone or beside other work, and the texts embedded meanwhile."""

    gaps: list[float] = field(default_factory=list[float])
    """Times between a stream's chunks; chunks that were read together count as one."""
    ttft: list[float] = field(default_factory=list[float])
    """Times to the first token of the streams."""
    prompt_ttft: list[float] = field(default_factory=list[float])
    """Times to the first token of the long prompts."""
    latency: list[float] = field(default_factory=list[float])
    """Times to the answers with a single text's vector."""
    lateness: list[float] = field(default_factory=list[float])
    """How late timers of the process that measures were: it cannot see shorter gaps than these."""
    texts: float = 0.0
    text_seconds: float = 0.0
    """The time in which so many texts were embedded."""

    def add_texts(self, outcomes: Iterable[Outcome], begin: float, end: float) -> None:
        """Counts the texts embedded from `begin` to `end`, of each request as much as lies between them."""
        self.text_seconds += end - begin
        for outcome in outcomes:
            within = min(outcome.ended, end) - max(outcome.due, begin)
            self.texts += outcome.inputs * max(0.0, within) / outcome.e2el


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one side, alone or beside other work; a metric that was not measured is None."""

    gaps: Spread | None
    ttft: Spread | None
    prompt_ttft: Spread | None
    latency: Spread | None
    lateness: Spread | None
    texts_per_second: float | None

    def by_name(self) -> dict[str, float]:
        """Every figure by a name, such as "gaps p99" """
        found: dict[str, float] = {}
        for metric in _TITLES:
            one: Spread | None = getattr(self, metric)
            if one is not None:
                named = {"median": one.median, **one.percentiles, "max": one.most}
                found |= {f"{metric} {name}": value for name, value in named.items() if name != "p50"}
        return found if self.texts_per_second is None else {**found, _TEXT_RATE: self.texts_per_second}


class Ratio(msgspec.Struct, frozen=True):
    """A figure beside other work over the same figure alone: of each round, the median and both ends."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


class Round(msgspec.Struct, frozen=True):
    alone: Figures
    beside: Figures


class MixedLoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `facet bench serve --beside`."""

    format: int = FORMAT
    date: str
    model: str
    endpoint: str
    work: dict[str, object]
    """The options that say what ran, and beside what."""
    alone: Figures
    """The figures of all rounds together."""
    beside: Figures
    ratios: dict[str, Ratio]
    rounds: list[Round]


def figures(samples: Sequence[Samples], percentiles: Sequence[float]) -> Figures:
    """The figures of one side, of all these samples together."""
    spreads = {
        metric: spread([value for one in samples for value in getattr(one, metric)], percentiles)
        for metric in _TITLES
    }
    texts, seconds = sum(one.texts for one in samples), sum(one.text_seconds for one in samples)
    return Figures(**spreads, texts_per_second=texts / seconds if seconds else None)


def ratios(rounds: Sequence[Round]) -> dict[str, Ratio]:
    found: dict[str, list[float]] = {}
    for one in rounds:
        alone = one.alone.by_name()
        for name, value in one.beside.by_name().items():
            if alone.get(name):
                found.setdefault(name, []).append(value / alone[name])
    return {name: Ratio(statistics.median(of), min(of), max(of)) for name, of in found.items()}


def table(result: MixedLoadResult) -> str:
    rows = [["", "alone", "beside", "beside / alone"]]
    alone, beside = result.alone.by_name(), result.beside.by_name()

    def add(title: str, name: str) -> None:
        values = [f"{side[name]:.2f}" if name in side else "" for side in (alone, beside)]
        rows.append([title, *values, str(result.ratios.get(name, ""))])

    for metric, title in _TITLES.items():
        kinds = [
            name.removeprefix(f"{metric} ") for name in {**alone, **beside} if name.startswith(f"{metric} ")
        ]
        if kinds:
            rows.append([title])
        for kind in kinds:
            if metric not in _FEW or kind in ("median", "max"):
                add(f"  {kind}", f"{metric} {kind}")
    if _TEXT_RATE in beside:
        add(_TEXT_RATE, _TEXT_RATE)
    return "\n".join(aligned(rows))
