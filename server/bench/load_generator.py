"""The two ways to load a server: so many requests at once (closed loop), or so many a second (open loop)."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

from server.bench.datasets import LoadRequest
from server.bench.endpoints import Outcome, Sender

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
