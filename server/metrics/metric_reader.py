"""Metrics as objects of the classes that vLLM has, for programs that have no page of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos"


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
    found: list[Metric] = []
    for family in text_string_to_metric_families(page):
        match family.type:
            case "histogram":
                found += _histograms(family.name, family.samples)
            case "counter" if family.name == _PLACES:
                found += _vectors(family.samples)
            case "counter":
                found += (Counter(family.name, each.labels, _plain(each.value)) for each in family.samples)
            case _:
                found += (Gauge(family.name, each.labels, each.value) for each in family.samples)
    return found


def _histograms(name: str, samples: Sequence[Sample]) -> Iterator[Histogram]:
    for labels, own in _by_labels(samples, "le"):
        histogram = Histogram(name, labels, 0, 0.0, {})
        for sample in own:
            match sample.name.removeprefix(name):
                case "_bucket":
                    histogram.buckets[sample.labels["le"]] = int(sample.value)
                case "_count":
                    histogram.count = int(sample.value)
                case _:
                    histogram.sum = sample.value
        yield histogram


def _vectors(samples: Sequence[Sample]) -> Iterator[Vector]:
    for labels, own in _by_labels(samples, "position"):
        yield Vector(_PLACES, labels, [int(sample.value) for sample in own])


def _by_labels(samples: Sequence[Sample], inner: str) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """Samples that have the same labels but `inner`, which tells those of one metric apart."""
    groups: dict[frozenset[tuple[str, str]], list[Sample]] = {}
    for sample in samples:
        outer = {name: value for name, value in sample.labels.items() if name != inner}
        groups.setdefault(frozenset(outer.items()), []).append(sample)
    for labels, own in groups.items():
        yield dict(labels), own


def _plain(value: float) -> float:
    return int(value) if value.is_integer() else value
