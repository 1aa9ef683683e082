"""Loads a server, with so many requests at once (closed loop) or so many a second (open loop), and turns
outcomes into figures and a table. The JSON result has the form of its structs.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TextIO

import msgspec

from server.bench.endpoints import LoadRequest, Outcome, Sender
from server.terminal.console import aligned
from server.terminal.progress_bar import StatusLine, bar_of_blocks

Prepared = tuple[bytes, int]
"""A request's body, and how many texts it holds."""
Done = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Load:
    concurrency: int | None = None
    """Requests at once; None is no bound."""
    rate: float = math.inf
    """Requests per second; infinity is as many as may run at once."""
    requests: int | None = None
    seconds: float | None = None
    """Seconds after which no request is sent."""
    burstiness: float = 1.0
    seed: int = 0


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collects before the block, and not within it: a pause there would pass for one of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def run_load(load: Load, sender: Sender, requests: Iterator[LoadRequest], done: Done) -> float:
    """Sends the requests and waits for the answers; returns the seconds it took. `done` gets each outcome."""
    prepared: Iterable[Prepared] = (
        (sender.write(one), len(one.texts)) for one in islice(requests, load.requests)
    )
    if load.requests is not None:
        prepared = list(prepared)  # written beforehand: that costs the server nothing
    started = time.perf_counter()
    end = math.inf if load.seconds is None else started + load.seconds
    if load.rate == math.inf and load.concurrency is not None:
        await _closed(load.concurrency, sender, iter(prepared), end, done)
    else:
        await _open(load, sender, prepared, started, end, done)
    return time.perf_counter() - started


async def _closed(count: int, sender: Sender, prepared: Iterator[Prepared], end: float, done: Done) -> None:
    async def one_after_another() -> None:
        for body, inputs in prepared:
            now = time.perf_counter()
            if now >= end:
                return
            done(await sender.send(body, inputs, now))

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one_after_another())


async def _open(
    load: Load, sender: Sender, prepared: Iterable[Prepared], started: float, end: float, done: Done
) -> None:
    places = nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)

    async def one(body: bytes, inputs: int, due: float) -> None:
        async with places:
            done(await sender.send(body, inputs, due))

    async with asyncio.TaskGroup() as group:
        for offset, (body, inputs) in zip(arrivals(load), prepared, strict=False):
            due = started + offset
            if due >= end:
                return
            # planned moments, not pauses: one that is late does not push those behind it
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(body, inputs, due))


def arrivals(load: Load) -> Iterator[float]:
    """The seconds from the start at which requests are due."""
    dice = random.Random(load.seed)
    at = 0.0
    while True:
        yield at
        if load.rate != math.inf:
            at += dice.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness))


FORMAT = 1
"""The version of the JSON result, which changes when a field changes its meaning."""


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    median: float
    least: float
    most: float
    percentiles: dict[str, float]
    """Percentiles by name, such as p99."""


class Failure(msgspec.Struct, frozen=True):
    kind: str
    count: int
    example: str
    """The server's message for the first failure of this kind."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one load."""

    concurrency: int | None
    request_rate: float | None
    """Requests per second that were asked for; None is as many as may run at once."""
    seconds: float
    completed: int
    failed: int
    failures: list[Failure]
    inputs: int
    input_tokens: int
    output_tokens: int
    requests_per_second: float
    inputs_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft: Spread | None
    """Time to the first token; None for endpoints that give no tokens."""
    tpot: Spread | None
    """Time per output token after the first."""
    itl: Spread | None
    """Time between chunks, which may hold several tokens."""
    e2el: Spread | None
    """Time to the end of the answer."""

    @property
    def name(self) -> str:
        bound = "all" if self.concurrency is None else str(self.concurrency)
        return f"{bound} at once" if self.request_rate is None else f"{self.request_rate:g}/s"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a whole benchmark."""

    format: int = FORMAT
    date: str
    endpoint: str
    model: str
    dataset: dict[str, object]
    points: list[Figures]


def summarize(
    load: Load, outcomes: Iterable[Outcome], seconds: float, percentiles: Sequence[float]
) -> Figures:
    """The figures of one load. Failed requests count in no other figure than that of failures."""
    every = list(outcomes)
    good = [one for one in every if one.error is None]
    seconds = max(seconds, 1e-9)
    inputs, read = sum(o.inputs for o in good), sum(o.input_tokens for o in good)
    written = sum(o.output_tokens for o in good)
    return Figures(
        concurrency=load.concurrency,
        request_rate=None if load.rate == math.inf else load.rate,
        seconds=seconds,
        completed=len(good),
        failed=len(every) - len(good),
        failures=_failures(every),
        inputs=inputs,
        input_tokens=read,
        output_tokens=written,
        requests_per_second=len(good) / seconds,
        inputs_per_second=inputs / seconds,
        output_tokens_per_second=written / seconds,
        total_tokens_per_second=(read + written) / seconds,
        ttft=spread([o.ttft for o in good if o.ttft is not None], percentiles),
        tpot=spread([o.tpot for o in good if o.tpot is not None], percentiles),
        itl=spread([gap for o in good for gap in o.gaps], percentiles),
        e2el=spread([o.e2el for o in good], percentiles),
    )


def spread(seconds: Sequence[float], percentiles: Sequence[float]) -> Spread | None:
    if not seconds:
        return None
    ordered = sorted(1000 * one for one in seconds)
    return Spread(
        mean=math.fsum(ordered) / len(ordered),
        median=percentile(ordered, 50),
        least=ordered[0],
        most=ordered[-1],
        percentiles={f"p{p:g}": percentile(ordered, p) for p in percentiles},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile, interpolated between the two nearest values."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _failures(outcomes: Sequence[Outcome]) -> list[Failure]:
    counts = Counter(one.error for one in outcomes if one.error is not None)
    examples = {one.error: one.detail for one in reversed(outcomes)}
    return [Failure(kind, count, examples[kind]) for kind, count in counts.most_common()]


_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between chunks",
    "e2el": "time to the end",
}


class LoadBar:
    """Progress of one load: a bar on a terminal, nothing elsewhere."""

    def __init__(
        self, title: str, total: int | None, seconds: float | None, out: TextIO | None = None
    ) -> None:
        self._title, self._total, self._seconds = title, total, seconds
        self._status = StatusLine(out)
        self._done = self._failed = self._tokens = 0

    def add(self, outcome: Outcome) -> None:
        self._done += 1
        self._failed += outcome.error is not None
        self._tokens += outcome.output_tokens or outcome.input_tokens
        self._status.draw(self.line)

    def close(self) -> None:
        self._status.clear()

    def line(self, passed: float) -> str:
        shares = [self._done / self._total] if self._total else []
        shares += [passed / self._seconds] if self._seconds else []
        failed = f", {self._failed} failed" if self._failed else ""
        count = f"{self._done}/{self._total}" if self._total else str(self._done)
        rate = self._tokens / max(passed, 1e-9)
        bar = bar_of_blocks(max(shares, default=0.0), 24)
        return f"{self._title}  {bar} {count} requests{failed}, {rate:.0f} tokens/s"


def table(points: Sequence[Figures], shown: Collection[str]) -> str:
    rows: list[list[str]] = [["", *(point.name for point in points)]]

    def add(title: str, values: Sequence[float | None], form: str) -> None:
        if any(value is not None for value in values):
            rows.append([title, *("" if value is None else format(value, form) for value in values)])

    add("requests done", [p.completed for p in points], "d")
    add("requests failed", [p.failed for p in points], "d")
    add("seconds", [p.seconds for p in points], ".2f")
    add("requests/s", [p.requests_per_second for p in points], ".2f")
    if any(p.inputs != p.completed for p in points):
        add("inputs/s", [p.inputs_per_second for p in points], ".1f")
    if any(p.output_tokens for p in points):
        add("output tokens/s", [p.output_tokens_per_second for p in points], ".1f")
    add("tokens/s, in and out", [p.total_tokens_per_second for p in points], ".1f")
    for metric, title in _TITLES.items():
        spreads: list[Spread | None] = [getattr(p, metric) for p in points]
        if metric not in shown or not any(spreads):
            continue
        rows.append([f"{title}, ms ({metric.upper()})"])
        add("  mean", [s and s.mean for s in spreads], ".2f")
        for name in next(s for s in spreads if s is not None).percentiles:
            label = "median" if name == "p50" else name
            add(f"  {label}", [s and s.percentiles[name] for s in spreads], ".2f")
    return "\n".join([*aligned(rows), *_failure_lines(points)])


def _failure_lines(points: Sequence[Figures]) -> list[str]:
    return [
        f"{point.name}: {failure.count} x {failure.kind}"
        + (f": {failure.example}" if failure.example else "")
        for point in points
        for failure in point.failures
    ]
