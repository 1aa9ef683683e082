"""The result for a terminal: what is measured alone and beside other work, with the ratios."""

from __future__ import annotations

from server.bench.beside.summary import METRICS, BesideResult, Ratio
from server.bench.table import aligned

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
