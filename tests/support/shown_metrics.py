"""The metrics of a server that has done a little of everything, for tests of what is written about them."""

from prometheus_client.parser import text_string_to_metric_families

from engine_core.client.replica import Replica
from engine_core.engine_stats import (
    LOAD_SECONDS,
    STEP_ROWS,
    STEP_SECONDS,
    STEP_TOKENS,
    AdapterStats,
    Buckets,
    GuessTotals,
    Stats,
    StepBuckets,
    Timing,
)
from server.metrics.server_metrics import Metrics
from worker.protocol import DiskTotals

SHOWN_BY = {"counter": "_total", "gauge": "", "histogram": ""}
"""What stands behind a family's name in queries, by its kind."""


def _buckets(bounds: tuple[float, ...]) -> Buckets:
    return Buckets((1,) + (0,) * len(bounds), 0.5)


def busy_metrics() -> Metrics:
    """Metrics of a server after a request, with one engine."""
    metrics = Metrics("m")
    metrics.http("/v1/completions", "POST", 200, 0.1)
    record = metrics.begin(prompt_tokens=4, n=1, max_tokens=5)
    record.tokens(1, cached=2)
    record.tokens(1, cached=0)
    record.finish("stop", Timing(0.1, 0.1, 0.1, preemptions=0))
    metrics.key_counters("someone")
    metrics.of_adapter("a").finished("stop")
    media = metrics.of_media()
    media.refuse("size")
    with media.timed("read"):
        pass
    rows = _buckets(STEP_ROWS)
    seconds, tokens = _buckets(STEP_SECONDS), _buckets(STEP_TOKENS)
    replica = Replica(0)
    landed = StepBuckets(seconds, tokens, decoding=rows, prompts=rows, texts=rows)
    disk = DiskTotals(1, 1, 1, 1, 0, 1)
    replica.stats = Stats(
        *(1, 1, 0.5, 4, 2, 0, 1, 4),
        landed=landed,
        guesses=GuessTotals(1, 1, [1]),
        disk=disk,
        host=disk,
        adapters=AdapterStats(["a"], [], 1, _buckets(LOAD_SECONDS)),
    )
    metrics.watch(lambda: [replica])
    return metrics


def labels_by_name() -> dict[str, set[str]]:
    """The labels of each metric, by the name that documents call it."""
    return {
        family.name + SHOWN_BY[family.type]: set[str]().union(*(sample.labels for sample in family.samples))
        for family in text_string_to_metric_families(busy_metrics().page().decode())
    }


def labels_by_sample() -> dict[str, set[str]]:
    """The labels of each name that a query may ask for."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(busy_metrics().page().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
