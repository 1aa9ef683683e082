"""Counters and histograms of a process that is alone: plain numbers until somebody asks for the page.

They have the methods of `prometheus_client`'s own, which lock and check at each call and take four times as
long (docs/decisions/0009). Several processes share their numbers through those (`server_metrics.py`). All
counting is done in the one event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class PlainCounter:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class PlainCounters(Collector):
    """A family of counters, one for each combination of its labels' values."""

    def __init__(self, name: str, text: str, labelnames: Sequence[str], registry: CollectorRegistry) -> None:
        self._about = name, text, labelnames
        self._known: defaultdict[tuple[str, ...], PlainCounter] = defaultdict(PlainCounter)
        registry.register(self)

    def labels(self, *values: str) -> PlainCounter:
        return self._known[values]

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, counter in self._known.items():
            family.add_metric(values, counter.value)
        yield family


class PlainHistogram:
    """The number of observed values in each bucket."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """Values in each bucket; the last one holds those above all bounds."""
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def snapshot(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """The upper bounds of the buckets, and the number of values in each; the last has no bound."""
        return tuple(self._bounds), tuple(self._counts)


class PlainHistograms(Collector):
    """A family of histograms, one for each combination of its labels' values."""

    def __init__(
        self,
        name: str,
        text: str,
        labelnames: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = name, text, labelnames
        self._known: defaultdict[tuple[str, ...], PlainHistogram] = defaultdict(
            lambda: PlainHistogram(buckets)
        )
        registry.register(self)

    def labels(self, *values: str) -> PlainHistogram:
        return self._known[values]

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, histogram in self._known.items():
            add_histogram(family, values, *histogram.snapshot(), histogram.total)
        yield family


def add_histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> None:
    """Adds a histogram to what is shown. The last of `counts` is that of values above all bounds."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), total)
