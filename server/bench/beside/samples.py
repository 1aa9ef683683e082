"""What is measured of one side, alone or beside other work, and how it is read from streams and clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from server.bench.beside.clients import check
from server.bench.load.endpoints import Outcome, Sender, StreamedAnswer

_TICK = 0.005
"""Seconds between two looks at the clock, or at a stream that another request waits for."""
_PAUSE = 0.1
"""Seconds between single texts: without them few quick moments would outnumber long slow ones."""


@dataclass(slots=True)
class Samples:
    """Times in seconds, and the texts that were embedded meanwhile."""

    gaps: list[float] = field(default_factory=list[float])
    """Times between a stream's chunks; chunks that were read together count as one."""
    ttft: list[float] = field(default_factory=list[float])
    """Times to the first token of the streams."""
    prompt_ttft: list[float] = field(default_factory=list[float])
    """Times to the first token of the long prompts."""
    latency: list[float] = field(default_factory=list[float])
    """Times to the answers with a single text's vector."""
    lateness: list[float] = field(default_factory=list[float])
    """How late timers of the process that measures were: it cannot see shorter gaps than these."""
    texts: float = 0.0
    text_seconds: float = 0.0
    """The time in which so many texts were embedded."""

    def add_texts(self, outcomes: Iterable[Outcome], begin: float, end: float) -> None:
        """Counts the texts embedded from `begin` to `end`, of each request as much as lies between them."""
        self.text_seconds += end - begin
        for outcome in outcomes:
            within = min(outcome.ended, end) - max(outcome.due, begin)
            self.texts += outcome.inputs * max(0.0, within) / outcome.e2el

    def add(self, other: Samples) -> None:
        for name in ("gaps", "ttft", "prompt_ttft", "latency", "lateness"):
            getattr(self, name).extend(getattr(other, name))
        self.texts += other.texts
        self.text_seconds += other.text_seconds


@asynccontextmanager
async def timed_ticks(lateness: list[float]) -> AsyncIterator[None]:
    """Keeps note of how late this process's timers are while the block runs."""

    async def tick() -> None:
        while True:
            due = time.perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            lateness.append(max(0.0, time.perf_counter() - due))

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()


async def read_streams(
    samples: Samples, sender: Sender, streams: Sequence[bytes], prompt: bytes | None, middle: int
) -> None:
    """Reads streams to their ends; `prompt` goes out when the first one has given `middle` chunks."""
    answers = [StreamedAnswer() for _ in streams]
    async with timed_ticks(samples.lateness):
        tasks = [
            asyncio.create_task(sender.send(message, 1, time.perf_counter(), answer))
            for message, answer in zip(streams, answers, strict=True)
        ]
        if prompt is not None:
            while len(answers[0].times) < middle and not tasks[0].done():
                await asyncio.sleep(_TICK)
            await time_prompt(samples, sender, prompt)
        outcomes = await asyncio.gather(*tasks)
    check(outcomes, "a stream")
    for outcome in outcomes:
        samples.ttft.append(outcome.times[0] - outcome.due)
        samples.gaps += gaps(outcome.times)


def gaps(times: Iterable[float]) -> list[float]:
    """The seconds between chunks, of which those that were read together count as one."""
    return [later - earlier for earlier, later in pairwise(sorted(set(times)))]


async def time_prompt(samples: Samples, sender: Sender, prompt: bytes) -> None:
    outcome = await sender.send(prompt, 1, time.perf_counter())
    check([outcome], "the long prompt")
    samples.prompt_ttft.append(outcome.times[0] - outcome.due)


async def time_texts(samples: Samples, sender: Sender, messages: Iterable[bytes]) -> None:
    """Embeds one text after the other, with a pause between them."""
    async with timed_ticks(samples.lateness):
        for message in messages:
            outcome = await sender.send(message, 1, time.perf_counter())
            check([outcome], "a text")
            samples.latency.append(outcome.e2el)
            await asyncio.sleep(_PAUSE)
