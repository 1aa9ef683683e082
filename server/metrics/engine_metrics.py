"""The engines' own numbers as metrics: read from what they told last, when somebody asks for the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

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
)

LABELS = ["model_name", "engine"]
Shown = Iterable[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, str]]

_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily


class EngineNumbers(Collector):
    """Metrics of each engine that runs, labelled with its number."""

    def __init__(
        self, model_name: str, replicas: Callable[[], Sequence[Replica]], max_loras: int = 0
    ) -> None:
        self._model, self._max_loras = model_name, max_loras
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        replicas = self._replicas()
        alive = GaugeMetricFamily("facet:replicas_alive", "Engines that can work.", labels=["model_name"])
        alive.add_metric([self._model], sum(one.works for one in replicas))
        yield alive
        stats_of = {str(one.number): one.stats for one in replicas if one.stats is not None}
        if not stats_of:
            return
        yield from self._numbers(stats_of, _NUMBERS)
        yield self._waiting(stats_of)
        yield from self._steps(_told(stats_of, "landed"))
        yield from self._guesses(_told(stats_of, "guesses"))
        yield from self._numbers(_told(stats_of, "disk"), _DISK)
        yield from self._numbers(_told(stats_of, "host"), _HOST)
        yield from self._adapters(_told(stats_of, "adapters"))

    def _numbers(self, told: Mapping[str, object], shown: Shown) -> Iterator[Metric]:
        """Gauges and counters of what engines have told, if any has."""
        for kind, name, field, text in shown if told else ():
            family = kind(name, text, labels=LABELS)
            for number, one in told.items():
                family.add_metric([self._model, number], getattr(one, field))
            yield family

    def _waiting(self, stats_of: Mapping[str, Stats]) -> Metric:
        """The requests that wait, by vLLM's two reasons."""
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait: for room, or deferred until their grammar is compiled.",
            labels=[*LABELS, "reason"],
        )
        for number, stats in stats_of.items():
            family.add_metric([self._model, number, "capacity"], stats.waiting - stats.deferred)
            family.add_metric([self._model, number, "deferred"], stats.deferred)
        return family

    def _steps(self, told: Mapping[str, StepBuckets]) -> Iterator[Metric]:
        """Histograms over the steps that have landed."""
        for name, field, bounds, text in _STEP_HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for number, landed in told.items():
                found: Buckets = getattr(landed, field)
                add_histogram(family, [self._model, number], bounds, found)
            yield family

    def _adapters(self, told: Mapping[str, AdapterStats]) -> Iterator[Metric]:
        """What is told of adapters, if there may be some. vLLM's gauge says it by its labels."""
        if not told:
            return
        names = ["model_name", "max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of live requests.", labels=names)
        waiting, running = (
            ",".join(sorted({name for one in lists for name in one}))
            for lists in ([one.waiting for one in told.values()], [one.running for one in told.values()])
        )
        info.add_metric([self._model, str(self._max_loras), waiting, running], time.time())
        held = GaugeMetricFamily("facet:lora_resident", "Adapters that workers hold.", labels=LABELS)
        loads = HistogramMetricFamily("facet:lora_load_seconds", "Seconds to load one.", labels=LABELS)
        for number, one in told.items():
            held.add_metric([self._model, number], one.resident)
            add_histogram(loads, [self._model, number], LOAD_SECONDS, one.loads)
        yield from (info, held, loads)

    def _guesses(self, told: Mapping[str, GuessTotals]) -> Iterator[Metric]:
        """Counters of guessed tokens, where engines guess."""
        if not told:
            return
        yield from self._numbers(told, _GUESSES)
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens, by their position in the draft.",
            labels=[*LABELS, "position"],
        )
        for number, totals in told.items():
            for place, held in enumerate(totals.held):
                places.add_metric([self._model, number, str(place)], held)
        yield places


def _told(stats_of: Mapping[str, Stats], field: str) -> dict[str, Any]:
    """What each engine tells in a field of its stats, if it tells anything there."""
    found = {number: getattr(stats, field) for number, stats in stats_of.items()}
    return {number: one for number, one in found.items() if one is not None}


_NUMBERS = (
    (_GAUGE, "vllm:num_requests_running", "running", "Requests in the running batch."),
    (_GAUGE, "vllm:num_requests_waiting", "waiting", "Requests that wait for a place."),
    (_GAUGE, "facet:waiting_tokens", "waiting_tokens", "Tokens that waiting requests need first."),
    (_GAUGE, "vllm:kv_cache_usage_perc", "kv_usage", "Share of the KV cache in use, 1 is all."),
    (_COUNTER, "vllm:prefix_cache_queries", "prefix_queries", "Prompt tokens sought in caches."),
    (_COUNTER, "vllm:prefix_cache_hits", "prefix_hits", "Prompt tokens found in caches."),
    (_COUNTER, "vllm:num_preemptions", "preemptions", "Requests put back for want of memory."),
    (_COUNTER, "facet:engine_busy_seconds", "busy", "Seconds spent on steps."),
    (_GAUGE, "facet:expected_wait_seconds", "expected_wait", "Until a new request's first token."),
    (_COUNTER, "facet:media_encoded", "media_encoded", "Pictures encoded."),
    (_COUNTER, "facet:media_reused", "media_reused", "Pictures of requests that were encoded already."),
    (_GAUGE, "facet:media_embeddings", "media_embeddings", "Embeddings of pictures that are held."),
    (_GAUGE, "facet:media_bytes", "media_bytes", "Bytes of the decoded pictures of live requests."),
    (_COUNTER, "facet:kernel_compilations", "kernel_compilations", "Kernels that a worker has compiled."),
)
"""Kind of metric, its name, the field of Stats that it shows, its help text."""

_GUESSES = (
    (_COUNTER, "vllm:spec_decode_num_drafts", "drafts", "Drafts, each of some proposed tokens."),
    (_COUNTER, "vllm:spec_decode_num_draft_tokens", "guessed", "Proposed tokens."),
    (_COUNTER, "vllm:spec_decode_num_accepted_tokens", "accepted", "Proposed tokens that were accepted."),
)
"""The same of GuessTotals."""

_DISK = (
    (_COUNTER, "facet:disk_blocks_written", "written", "Cache blocks written to disk."),
    (_COUNTER, "facet:disk_bytes_written", "bytes_written", "Bytes of these blocks."),
    (_COUNTER, "facet:disk_blocks_read", "read", "Cache blocks brought back from disk."),
    (_COUNTER, "facet:disk_bytes_read", "bytes_read", "Bytes of these blocks."),
    (_COUNTER, "facet:disk_failures", "failures", "Files of blocks that failed, or were damaged."),
    (_GAUGE, "facet:disk_bytes_held", "held", "Bytes of all files of blocks in the folder."),
)
"""Kind of metric, its name, the field of DiskTotals that it shows, its help text."""

_HOST = (
    (_COUNTER, "facet:host_blocks_written", "written", "Cache blocks of a card saved in the host's memory."),
    (_COUNTER, "facet:host_bytes_written", "bytes_written", "Bytes of these blocks."),
    (_COUNTER, "facet:host_blocks_read", "read", "Cache blocks brought back from the host's memory."),
    (_COUNTER, "facet:host_bytes_read", "bytes_read", "Bytes of these blocks."),
    (_COUNTER, "facet:host_failures", "failures", "Copies that failed: after one nothing more is kept."),
    (_GAUGE, "facet:host_bytes_held", "held", "Bytes of all blocks in the host's memory."),
)
"""The same of blocks in the host's memory."""

_STEP_HISTOGRAMS = (
    ("facet:step_seconds", "seconds", STEP_SECONDS, "Seconds of a step."),
    ("vllm:iteration_tokens_total", "tokens", STEP_TOKENS, "Tokens that a step computes."),
    ("facet:step_decode_rows", "decoding", STEP_ROWS, "Answers that get a further token in a step."),
    ("facet:step_prompt_rows", "prompts", STEP_ROWS, "Prompts, or chunks of them, read in a step."),
    ("facet:step_pooled_rows", "texts", STEP_ROWS, "Texts to be pooled in a step."),
)
"""Name, the field of StepBuckets that it shows, its bounds, its help text."""


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], bounds: Sequence[float], found: Buckets
) -> None:
    """Adds a histogram to what is shown. The last of its counts is that of values above all bounds."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    family.add_metric(labels, list(zip(names, accumulate(found.counts), strict=True)), found.total)
