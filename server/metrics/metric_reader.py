"""Metrics as objects of the classes that vLLM has, for programs that have no page of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(slots=True)
class Metric:
    """A metric of one combination of labels: there may be others of the same name."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A number that only grows: a whole one, unless it counts seconds."""

    value: float


@dataclass(slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(slots=True)
class Vector(Metric):
    """Counters in a row: the guessed tokens that held, by their place in a draft."""

    values: list[int]


@dataclass(slots=True)
class Histogram(Metric):
    """How many observations were at most as large as each bound of `buckets`, whose last is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(page: str) -> list[Metric]:
    """The metrics of a page in Prometheus' text format."""
    return [
        _metric(family, labels, samples)
        for family in text_string_to_metric_families(page)
        for labels, samples in _by_labels(family.samples)
    ]


def _metric(family: Family, labels: dict[str, str], samples: Sequence[Sample]) -> Metric:
    name, value = family.name, samples[0].value
    if family.type == "gauge":
        return Gauge(name, labels, value)
    if "position" in samples[0].labels:
        return Vector(name, labels, [int(each.value) for each in samples])
    if family.type == "counter":
        return Counter(name, labels, int(value) if value.is_integer() else value)
    buckets = {each.labels["le"]: int(each.value) for each in samples if "le" in each.labels}
    others = {each.name.removeprefix(name): each.value for each in samples}
    return Histogram(name, labels, int(others["_count"]), others["_sum"], buckets)


def _by_labels(samples: Sequence[Sample]) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """The samples of each metric: those with the same labels, but for bounds and places."""
    groups: dict[frozenset[tuple[str, str]], list[Sample]] = {}
    for sample in samples:
        outer = frozenset(pair for pair in sample.labels.items() if pair[0] not in ("le", "position"))
        groups.setdefault(outer, []).append(sample)
    for labels, own in groups.items():
        yield dict(sorted(labels)), own
