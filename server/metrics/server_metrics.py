"""Prometheus metrics under vLLM's names, so that dashboards made for vLLM work here.

Only numbers that this server really has are reported. Several API servers write their shares into the run's
private folder through prometheus_client's multiprocess mode, and any of them answers for all. A process that
is alone has cheaper counters (`plain_metrics.py`).
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from engine_core.client.replica import Replica
from engine_core.engine_stats import PlainHistogram, Timing
from server.metrics.engine_metrics import EngineNumbers, add_histogram
from server.metrics.optional_metrics import (
    OF_ADAPTERS,
    OF_KEYS,
    AdapterCounters,
    KeyCounters,
    MediaMetrics,
    SpeechMetrics,
)
from worker import logs


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
            add_histogram(family, values, histogram.bounds, histogram.buckets)
        yield family


CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # they would be a second line for every number

_LABELS = ("model_name", "engine")
_LATER = (0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_LATER, 160, 640)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_LATER)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_COMPUTE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LAG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 30)
_FACTORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """The metrics of this process, and the page that shows them."""

    _media: MediaMetrics | None = None
    _speech: SpeechMetrics | None = None
    adapter: AdapterCounters | None = None

    def __init__(self, model_name: str, shared: Path | None = None, engine: int = 0) -> None:
        """`shared`: where several API servers share their metrics, if they do; `engine`: the first number."""
        self._registry = CollectorRegistry()
        self._others: list[Metrics] = []
        self._shown = self._registry
        self._model, self._engine = model_name, str(engine)
        self.totals = [0, 0]
        self._counters: type[Counter | PlainCounters] = PlainCounters
        self._histograms: type[Histogram | PlainHistograms] = PlainHistograms
        if shared is not None:
            self._counters, self._histograms = Counter, Histogram
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown, path=str(shared))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        self._rejections = self._counter("admission_rejections", "Requests refused by a full queue.")
        ended = "Requests that ended, by reason."
        finished = self._family("vllm:request_success", ended, *_LABELS, "finished_reason")
        self._finished = cache(lambda reason: finished.labels(model_name, self._engine, reason))
        self.first_token = self._histogram("time_to_first_token_seconds", "Until the first token.", _FIRST)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between tokens.", _BETWEEN)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _BETWEEN
        )
        self.loop_lag = self._histogram(
            "facet:loop_lag_seconds", "Between the time for a turn of the event loop and the turn.", _LAG
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to end.", _WHOLE)
        self.queued = self._histogram("request_queue_time_seconds", "Spent waiting.", _WHOLE)
        self.prefill = self._histogram("request_prefill_time_seconds", "Spent reading the prompt.", _WHOLE)
        self.decode = self._histogram("request_decode_time_seconds", "Spent generating.", _WHOLE)
        self.inference = self._histogram("request_inference_time_seconds", "Prefill and decode.", _WHOLE)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.output_length = self._histogram("request_generation_tokens", "Tokens of an output.", _TOKENS)
        self.asked_n = self._histogram("request_params_n", "Parameter n.", (1, 2, 5, 10, 20, 50, 100))
        self.asked_tokens = self._histogram("request_params_max_tokens", "Parameter max_tokens.", _TOKENS)
        self.compute = self._histogram("facet:request_compute_seconds", "Cost to the engine.", _COMPUTE)
        self.preemptions = self._histogram("request_num_preemptions", "Preemptions.", (0, 1, 2, 5, 10))
        self.replicas: Callable[[], Sequence[Replica]] = tuple
        """A function that returns what is known of each engine."""
        repaired = self._family(
            "facet:tool_calls_repaired", "Calls that were mended.", "model_name", "dialect"
        )
        self.repaired_calls = cache(lambda dialect: repaired.labels(model_name, dialect))
        self._count_sources()
        self._count_http()
        self._of_keys, self._of_adapters = self._by("key", OF_KEYS), self._by("adapter", OF_ADAPTERS)

    @property
    def tokens_so_far(self) -> tuple[int, int]:
        """The prompt tokens and generated tokens of this process so far."""
        every = [self, *self._others]
        return sum(each.totals[0] for each in every), sum(each.totals[1] for each in every)

    def show_beside(self, other: Metrics) -> None:
        """Have the page tell of another model, too."""
        self._others.append(other)

    def begin(self, prompt_tokens: int, n: int, max_tokens: int) -> RequestRecord:
        return RequestRecord(self, prompt_tokens, n, max_tokens)

    def pooled(self, prompt_tokens: int, cached: int, seconds: float, timing: Timing | None) -> None:
        """Counts one pooled text."""
        self.count_tokens(prompt_tokens, 0)
        self.prompt_length.observe(prompt_tokens)
        if cached:
            self.prompt_tokens_cached.inc(cached)
        self.count_sources(prompt_tokens, cached)
        self.finished("stop")
        self.whole.observe(seconds)
        if timing is not None:
            self.observe_timing(timing)

    def observe_timing(self, timing: Timing) -> None:
        self.queued.observe(timing.queued)
        self.prefill.observe(timing.prefill)
        self.decode.observe(timing.decode)
        self.inference.observe(timing.prefill + timing.decode)
        self.compute.observe(timing.compute)
        self.preemptions.observe(timing.preemptions)

    def count_tokens(self, prompt: int, generated: int) -> None:
        if prompt:
            self.totals[0] += prompt
            self.prompt_tokens.inc(prompt)
        if generated:
            self.totals[1] += generated
            self.generation_tokens.inc(generated)
        if self.adapter is not None:
            self.adapter.prompt_tokens.inc(prompt)
            self.adapter.generation_tokens.inc(generated)

    def count_sources(self, prompt: int, cached: int) -> None:
        """Count where the tokens of a prompt came from."""
        self._computed.inc(prompt - cached)
        if cached:
            self._found.inc(cached)

    def key_counters(self, name: str) -> KeyCounters:
        """The counters of the key of this name, which are their label's only values."""
        return KeyCounters(*(family.labels(self._model, name) for family in self._of_keys))

    def of_adapter(self, name: str) -> Metrics:
        """These metrics for requests of one adapter, which are counted by its name, too."""
        own = copy.copy(self)
        own.adapter = AdapterCounters(*(each.labels(self._model, name) for each in self._of_adapters))
        return own

    def of_media(self) -> MediaMetrics:
        """The metrics of media, which are shown from now on."""
        self._media = self._media or self._count_media()
        return self._media

    def of_speech(self) -> SpeechMetrics:
        """The metrics of transcriptions, which are shown from now on."""
        if self._speech is None:
            factor = self._histograms(
                "facet:audio_real_time_factor",
                "Seconds of work by seconds of recording.",
                ["model_name"],
                buckets=_FACTORS,
                registry=self._registry,
            )
            self._speech = SpeechMetrics(
                self._counter("facet:audio_seconds", "Seconds of recordings transcribed."),
                self._counter("facet:audio_pieces", "Pieces of recordings read."),
                self._counter("facet:audio_retries", "Pieces read once more with a higher temperature."),
                factor.labels(self._model),
            )
        return self._speech

    def _count_media(self) -> MediaMetrics:
        name = "facet:media_seconds"
        seconds = self._histograms(
            name, "Spent on a media item.", ["model_name", "stage"], buckets=_HTTP, registry=self._registry
        )
        refused = self._family("facet:media_refused", "Items refused, by reason.", "model_name", "reason")
        return MediaMetrics(
            self._counter("mm_cache_queries", "Prepared media items looked up."),
            self._counter("mm_cache_hits", "Prepared media items found."),
            lambda stage: seconds.labels(self._model, stage),
            lambda reason: refused.labels(self._model, reason),
        )

    def rejected(self) -> None:
        self._rejections.inc()

    def finished(self, reason: str) -> None:
        self._finished(reason).inc()
        if self.adapter is not None:
            self.adapter.requests.inc()

    def _count_sources(self) -> None:
        sources = self._family(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of requests that ended, by where they came from.",
            *_LABELS,
            "source",
        )
        self._computed = sources.labels(self._model, self._engine, "local_compute")
        self._found = sources.labels(self._model, self._engine, "local_cache_hit")

    def _count_http(self) -> None:
        requests = self._family("http_requests", "HTTP requests.", "handler", "method", "status")
        durations = self._histograms(
            "http_request_duration_seconds",
            "Duration of HTTP requests, streams to their end.",
            ["handler", "method"],
            buckets=_HTTP,
            registry=self._registry,
        )
        self._http_requests = cache(lambda *labels: requests.labels(*labels))
        self._http_durations = cache(lambda *labels: durations.labels(*labels))
        self._dropped = 0
        self._lines_dropped = self._family(
            "facet:log_lines_dropped",
            "Lines of the API server's log that nobody read in time, or that found the disk full.",
            "model_name",
        ).labels(self._model)

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._http_requests(handler, method, f"{status // 100}xx").inc()
        self._http_durations(handler, method).observe(seconds)

    def watch(self, replicas: Callable[[], Sequence[Replica]], max_loras: int = 0) -> None:
        """Adds the engines' own numbers, which are asked for whenever the page is."""
        if self.replicas is tuple:
            self._shown.register(EngineNumbers(self._model, lambda: self.replicas(), max_loras))
        self.replicas = replicas

    def count_dropped_lines(self) -> None:
        """Counts the lines of this process's log that were lost; call this now and then."""
        if lost := logs.dropped() - self._dropped:
            self._dropped += lost
            self._lines_dropped.inc(lost)

    def page(self) -> bytes:
        self.count_dropped_lines()
        return generate_latest(_Joined([each._shown for each in (self, *self._others)]))

    def _by(self, label: str, families: Sequence[tuple[str, str]]) -> list[Counter | PlainCounters]:
        return [self._family(*each, "model_name", label) for each in families]

    def _family(self, name: str, text: str, *labels: str) -> Counter | PlainCounters:
        return self._counters(name, text, labels, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter | PlainCounter:
        full = name if ":" in name else f"vllm:{name}"
        return self._family(full, text, *_LABELS).labels(self._model, self._engine)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram | PlainHistogram:
        full = name if ":" in name else f"vllm:{name}"
        family = self._histograms(full, text, _LABELS, buckets=buckets, registry=self._registry)
        return family.labels(self._model, self._engine)


class _Joined(CollectorRegistry):
    """Several registries as one: a family that is in several of them is shown once."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        super().__init__()
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for family in (family for each in self._registries for family in each.collect()):
            if (known := found.setdefault(family.name, family)) is not family:
                known.samples += family.samples
        yield from found.values()


class RequestRecord:
    """The times and counts of one choice of one request."""

    __slots__ = ("_cached", "_count", "_first", "_last", "_metrics", "_prompt", "_started")

    def __init__(self, metrics: Metrics, prompt_tokens: int, n: int, max_tokens: int) -> None:
        self._metrics = metrics
        self._started = self._last = time.monotonic()
        self._first = 0.0
        self._count = self._cached = 0
        self._prompt = prompt_tokens
        metrics.count_tokens(prompt_tokens, 0)
        metrics.prompt_length.observe(prompt_tokens)
        metrics.asked_n.observe(n)
        metrics.asked_tokens.observe(max_tokens)

    def tokens(self, count: int, cached: int) -> None:
        metrics = self._metrics
        if cached:
            self._cached += cached
            metrics.prompt_tokens_cached.inc(cached)
        if not count:
            return
        now = time.monotonic()
        if not self._count:
            self._first = now
            metrics.first_token.observe(now - self._started)
        else:
            metrics.inter_token.observe((now - self._last) / count)
        self._last = now
        self._count += count
        metrics.totals[1] += count
        metrics.generation_tokens.inc(count)
        if metrics.adapter is not None:
            metrics.adapter.generation_tokens.inc(count)

    def finish(self, reason: str, timing: Timing | None) -> None:
        metrics = self._metrics
        metrics.finished(reason)
        metrics.whole.observe(time.monotonic() - self._started)
        metrics.output_length.observe(self._count)
        if self._count > 1:
            metrics.per_token.observe((self._last - self._first) / (self._count - 1))
        if timing is not None:
            metrics.observe_timing(timing)
            metrics.count_sources(self._prompt, self._cached)
