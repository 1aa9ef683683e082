"""The live data of the page: what is counted of the server anyway, read only when somebody looks."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from engine_core.client.replica import Replica
from server.errors import ApiError
from server.frontend.frontend import Frontend
from server.http.server_status import Dead, Draining, Ready, Restarting, Stalled, Starting
from server.http.sse import DONE
from server.metrics.plain_metrics import PlainHistogram

SECONDS = 1.0
"""Seconds between two events of a stream."""
MOST_WATCHERS = 32
MOST_REQUESTS = 50
_LAST = ("draining", "dead")
"""States after which a stream has no more events. Pages ask again, and learn what came of the server."""


class TooManyWatchers(ApiError):
    status = 429
    type = "RateLimitError"


class ReplicaState(msgspec.Struct):
    number: int
    state: str
    phase: str
    progress: float
    running: int = 0
    waiting: int = 0
    cache: float = 0.0
    """The share of the KV cache in use."""
    steps: int = 0
    step_tokens: int = 0
    busy: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    decoding: float = 0.0
    """The rows of all steps that decode."""
    prompts: float = 0.0
    """The prompts of all steps, and chunks of prompts."""
    texts: float = 0.0
    """The texts of all steps that become vectors."""


class LiveRequest(msgspec.Struct):
    """A request in flight, without a word of it."""

    id: str
    """The id of its answer, by whose beginning one sees what it asks for."""
    age: float
    """The seconds since its arrival."""
    answers: int
    """The answers, or texts, that are still to come."""
    begun: bool
    """Whether one of them has begun to come."""


class Histogram(msgspec.Struct):
    """A histogram's upper bounds, and how many values there were in each bucket; the last has no bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class LiveStatus(msgspec.Struct):
    """The server at one moment. Counts are totals: a page that looks twice has the rates."""

    time: float
    """The moment, in seconds on a clock that never goes back."""
    state: str
    reason: str
    stage: str
    progress: float
    model: str
    live: int
    """The answers that this API process generates."""
    prompt_tokens: int
    generation_tokens: int
    replicas: list[ReplicaState]
    ranks: int
    """The ranks of each replica. They have its state, because it ends with each of them."""
    requests: list[LiveRequest]
    """The oldest requests of this API process, at most MOST_REQUESTS."""
    first_token: Histogram | None
    """Seconds to the first token; None if several API processes share their metrics."""
    per_token: Histogram | None


class Watch:
    """The streams of one application."""

    def __init__(self) -> None:
        self.watchers = 0

    def begin(self, frontend: Frontend) -> AsyncGenerator[bytes]:
        """A stream for one more page. Raises TooManyWatchers."""
        if self.watchers >= MOST_WATCHERS:
            raise TooManyWatchers(f"{MOST_WATCHERS} pages watch this server already; close one of them.")
        return self._events(frontend)

    async def _events(self, frontend: Frontend) -> AsyncGenerator[bytes]:
        self.watchers += 1
        encode = msgspec.json.Encoder().encode
        try:
            while True:
                now = live_status(frontend)
                event = b"data: " + encode(now) + b"\n\n"
                if now.state in _LAST:
                    yield event + DONE  # no page may keep a server from ending
                    return
                yield event
                await asyncio.sleep(SECONDS)
        finally:
            self.watchers -= 1


def live_status(frontend: Frontend) -> LiveStatus:
    state, reason, stage, progress = _state(frontend)
    metrics = frontend.metrics
    read, written = metrics.tokens_so_far
    return LiveStatus(
        time=time.monotonic(),
        state=state,
        reason=reason,
        stage=stage,
        progress=progress,
        model=frontend.config.model_names[0],
        live=frontend.live,
        prompt_tokens=read,
        generation_tokens=written,
        replicas=[_replica(one) for one in metrics.replicas()],
        ranks=frontend.config.engine.ranks,
        requests=_requests(frontend),
        first_token=_histogram(metrics.first_token),
        per_token=_histogram(metrics.per_token),
    )


def _requests(frontend: Frontend) -> list[LiveRequest]:
    now = time.monotonic()
    came = [one for same in frontend.admissions.by_id.values() for one in same if one.since]
    oldest = heapq.nsmallest(MOST_REQUESTS, came, key=lambda one: one.since)
    return [LiveRequest(one.id, now - one.since, one.count, one.begun) for one in oldest]


def _state(frontend: Frontend) -> tuple[str, str, str, float]:
    """State, reason, stage and progress, in the words of /ready."""
    match frontend.status:
        case Ready():
            return "ready", "", "", 1.0
        case Starting(stage, fraction):
            return "loading", "loading", stage, fraction
        case Restarting(reason, _):
            return "restarting", reason, "", 0.0
        case Stalled():
            return "stalled", "engine_stalled", "", 0.0
        case Draining():
            return "draining", "draining", "", 0.0
        case Dead(reason):
            return "dead", reason, "", 0.0


def _replica(one: Replica) -> ReplicaState:
    if one.given_up or one.lost is not None:
        state = "given up" if one.given_up else "lost"
    elif one.works:
        state = "stalled" if one.stalled else "leaving" if one.leaving else "works"
    else:
        state = "starts"
    shown = ReplicaState(one.number, state, one.progress.phase, one.progress.fraction)
    if (stats := one.stats) is not None:
        shown.running, shown.waiting, shown.cache = stats.running, stats.waiting, stats.kv_usage
        shown.steps, shown.step_tokens, shown.busy = stats.steps, stats.step_tokens, stats.busy
        shown.prefix_queries, shown.prefix_hits = stats.prefix_queries, stats.prefix_hits
        shown.preemptions = stats.preemptions
        if (landed := stats.landed) is not None:
            shown.decoding, shown.prompts = landed.decoding.total, landed.prompts.total
            shown.texts = landed.texts.total
    return shown


def _histogram(histogram: Any) -> Histogram | None:
    if not isinstance(histogram, PlainHistogram):
        return None
    return Histogram(*histogram.snapshot())
