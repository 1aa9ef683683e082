"""Turns the samples of all rounds into figures and a table. The JSON result has the form of these structs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from server.bench.beside.samples import Samples
from server.bench.summary import FORMAT, Spread, aligned, spread

METRICS = ("gaps", "ttft", "prompt_ttft", "latency", "lateness")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one side, alone or beside other work; a metric that was not measured is None."""

    gaps: Spread | None
    ttft: Spread | None
    prompt_ttft: Spread | None
    latency: Spread | None
    lateness: Spread | None
    texts_per_second: float | None

    def values(self) -> dict[str, float]:
        """Every figure by a name, such as "gaps p99" """
        spreads = ((metric, getattr(self, metric)) for metric in METRICS)
        found: dict[str, float] = {}
        for metric, one in spreads:
            if one is not None:
                named = {"median": one.median, **one.percentiles, "max": one.most}
                found |= {f"{metric} {name}": value for name, value in named.items() if name != "p50"}
        return found if self.texts_per_second is None else {**found, "texts/s": self.texts_per_second}


class Ratio(msgspec.Struct, frozen=True):
    """A figure beside other work over the same figure alone: of each round, the median and both ends."""

    median: float
    least: float
    most: float


class Round(msgspec.Struct, frozen=True):
    alone: Figures
    beside: Figures


class BesideResult(msgspec.Struct, frozen=True, kw_only=True):
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


def figures(samples: Samples, percentiles: Sequence[float]) -> Figures:
    return Figures(
        **{metric: spread(getattr(samples, metric), percentiles) for metric in METRICS},
        texts_per_second=samples.texts / samples.text_seconds if samples.text_seconds else None,
    )


def together(samples: Sequence[Samples], percentiles: Sequence[float]) -> Figures:
    every = Samples()
    for one in samples:
        every.add(one)
    return figures(every, percentiles)


def ratios(rounds: Sequence[Round]) -> dict[str, Ratio]:
    found: dict[str, list[float]] = {}
    for one in rounds:
        alone = one.alone.values()
        for name, value in one.beside.values().items():
            if alone.get(name):
                found.setdefault(name, []).append(value / alone[name])
    return {name: Ratio(statistics.median(of), min(of), max(of)) for name, of in found.items()}


_TITLES = {
    "gaps": "time between chunks, ms",
    "ttft": "time to first token of a stream, ms",
    "prompt_ttft": "time to first token of the long prompt, ms",
    "latency": "time to a single text's vector, ms",
    "lateness": "lateness of the reader's own timers, ms",
}
_FEW = ("ttft", "prompt_ttft")
"""Metrics of which a round gives too few for percentiles."""


def table(result: BesideResult) -> str:
    rows = [["", "alone", "beside", "beside / alone"]]
    alone, beside = result.alone.values(), result.beside.values()
    for metric in METRICS:
        names = [name for name in {**alone, **beside} if name.startswith(f"{metric} ")]
        if names:
            rows.append([_TITLES[metric]])
        for name in names:
            kind = name.removeprefix(f"{metric} ")
            if metric not in _FEW or kind in ("median", "max"):
                rows.append([f"  {kind}", *_cells(result, name)])
    if "texts/s" in beside:
        rows.append(["texts/s", *_cells(result, "texts/s")])
    return "\n".join(aligned(rows))


def _cells(result: BesideResult, name: str) -> list[str]:
    values = (result.alone.values().get(name), result.beside.values().get(name))
    return [*("" if value is None else f"{value:.2f}" for value in values), _ratio(result.ratios.get(name))]


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
