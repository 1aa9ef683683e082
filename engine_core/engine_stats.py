"""Statistics of an engine: its speed, the lengths of its answers, the contents of its steps.

Servers and engines compute waits from the first two; the last, and what is told of experts, is for metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import expm1

import msgspec

from worker.protocol import DiskTotals

STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's bounds for the tokens of a step."""
STEP_ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Rates(msgspec.Struct, frozen=True, gc=False):
    """The speed of an engine while it has more to do than it can do at once."""

    prompt_rate: float
    """The tokens of prompts that it computes in a second of nothing else."""
    step: float
    """The seconds of a step in which all running sequences get a token, without prompts."""
    step_rows: float
    step_prompts: float
    """The tokens of prompts that fit into a step beside them."""
    stop_rate: float
    """The chance of a token to be the last of its answer."""

    def seconds(self, prompts: float, answers: float) -> float:
        """The time that so many tokens of prompts and of answers take."""
        steps = max(prompts / self.step_prompts, answers / self.step_rows)
        return prompts / self.prompt_rate + steps * self.step


class Buckets(msgspec.Struct, frozen=True, gc=False):
    """The values in each bucket of a histogram, the last of which has no bound, and their sum."""

    counts: tuple[int, ...]
    total: float


class PlainHistogram:
    """The number of observed values in each bucket; the last one holds those above all bounds."""

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds = self._counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._total += value

    @property
    def buckets(self) -> Buckets:
        return Buckets(tuple(self._counts), self._total)


class StepBuckets(msgspec.Struct, frozen=True, gc=False):
    """Histograms of an engine's steps: their times, and what they computed."""

    seconds: Buckets
    tokens: Buckets
    decoding: Buckets
    """The rows of a step that got a token behind one that was sampled."""
    prompts: Buckets
    """The rows that read a prompt, or a chunk of one."""
    texts: Buckets


class GuessTotals(msgspec.Struct, frozen=True, gc=False):
    """Counts of guessed tokens: how many were proposed, and how many held."""

    drafts: int
    """How often tokens were guessed for a sequence."""
    guessed: int
    """The tokens that were guessed."""
    held: list[int]
    """How often the first guess of a draft held, how often the second one, and so on."""

    @property
    def accepted(self) -> int:
        return sum(self.held)


class Timing(msgspec.Struct, frozen=True, gc=False):
    """The times of a request in seconds, as the engine measured them."""

    queued: float
    prefill: float
    decode: float
    preemptions: int
    steps: int = 0
    """The number of steps in which tokens of the request were computed."""
    compute: float = 0.0
    """The seconds that the request cost the engine: the shares of all requests add up to its busy time."""


class GuessReport(msgspec.Struct, frozen=True, gc=False):
    """The guesses for an answer and how many held, step by step; steps without guesses are left out."""

    guessed: list[int]
    """How many tokens were guessed."""
    held: list[int]
    """How many of them held."""


class AdapterStats(msgspec.Struct, frozen=True, gc=False):
    """The names of adapters that an engine computes with, and how many its workers have."""

    running: list[str]
    waiting: list[str]
    """The names of those that requests wait for until they are loaded."""
    resident: int
    loads: Buckets
    """The seconds that adapters took to be loaded."""


class Stats(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine's gauges and running totals, sent when they have changed, a few times a second at most."""

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    """The number of prompt tokens looked up in the prefix cache, in total."""
    prefix_hits: int
    preemptions: int
    steps: int
    step_tokens: int
    busy: float = 0.0
    """The seconds for which the engine has computed steps, in total."""
    expected_wait: float = 0.0
    """The seconds in which a short prompt that arrived now would get its first token."""
    rates: Rates | None = None
    waiting_tokens: int = 0
    """The tokens that the requests that wait have to compute before their first answer."""
    deferred: int = 0
    """The number of waiting requests for which no room is missing: their grammar is being compiled."""
    landed: StepBuckets | None = None
    kernel_compilations: int = 0
    """The kernels that the worker has compiled since its start, in total."""
    media_encoded: int = 0
    """The media items that were encoded, in total."""
    media_reused: int = 0
    """How often a request has found the embeddings of an item that was encoded before, in total."""
    media_embeddings: int = 0
    """The embeddings that are held."""
    media_bytes: int = 0
    """The bytes that the media of live requests take."""
    guesses: GuessTotals | None = None
    """What became of guesses in total, if the engine makes some."""
    disk: DiskTotals | None = None
    """What became of cache blocks on disk, if some are kept there."""
    host: DiskTotals | None = None
    """What became of those in the host's memory, if some are kept there."""
    adapters: AdapterStats | None = None
    """News of adapters, if requests may name some."""


def expected_length(most: float, stop_rate: float) -> float:
    """The tokens of an answer that has `most` at most, and ends after each of them with this chance."""
    if stop_rate * most < 1e-6:
        return most
    return -expm1(-stop_rate * most) / stop_rate
