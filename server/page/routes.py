"""GET / and HEAD /: the page for people, its files, and the stream of what the server does now.

The files are read once, and named by a digest of all of them, so that browsers keep them.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import re
import time
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from engine_core.client.replica import Replica
from engine_core.engine_stats import PlainHistogram
from server.errors import ApiError, NotFound
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.http.endpoint import Endpoint
from server.http.sse import DONE, EventStream, event
from server.page.joined_scripts import join_scripts

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

    def begin(self, frontend: Frontend | ManyModels) -> AsyncGenerator[bytes]:
        """A stream for one more page. Raises TooManyWatchers."""
        if self.watchers >= MOST_WATCHERS:
            raise TooManyWatchers(f"{MOST_WATCHERS} pages watch this server already; close one of them.")
        return self._events(frontend)

    async def _events(self, frontend: Frontend | ManyModels) -> AsyncGenerator[bytes]:
        self.watchers += 1
        try:
            while True:
                now = live_status(frontend)
                if now.state in _LAST:
                    yield event(now) + DONE  # no page may keep a server from ending
                    return
                yield event(now)
                await asyncio.sleep(SECONDS)
        finally:
            self.watchers -= 1


def live_status(frontend: Frontend | ManyModels) -> LiveStatus:
    """What a server does now; of several models, those that are loaded are shown like replicas of one."""
    status, metrics = frontend.status, frontend.metrics
    if isinstance(frontend, ManyModels):
        loaded = frontend.loaded
        model = ", ".join(each.config.model_names[0] for each in loaded)
        replicas = [_replica(one, number) for number, one in enumerate(frontend.replicas)]
    else:
        loaded, model = [frontend], frontend.config.model_names[0]
        replicas = [_replica(one, one.number) for one in metrics.replicas()]
    read, written = metrics.tokens_so_far
    return LiveStatus(
        time=time.monotonic(),
        state=status.state,
        reason=status.reason,
        stage=status.stage,
        progress=status.fraction,
        model=model,
        live=frontend.live,
        prompt_tokens=read,
        generation_tokens=written,
        replicas=replicas,
        ranks=frontend.config.engine.ranks,
        requests=_requests(loaded),
        first_token=_histogram(metrics.first_token),
        per_token=_histogram(metrics.per_token),
    )


def _requests(frontends: Sequence[Frontend]) -> list[LiveRequest]:
    now = time.monotonic()
    all_ids = [same for each in frontends for same in each.admissions.by_id.values()]
    came = [one for same in all_ids for one in same if one.since]
    oldest = heapq.nsmallest(MOST_REQUESTS, came, key=lambda one: one.since)
    return [LiveRequest(one.id, now - one.since, one.count, one.begun) for one in oldest]


def _replica(one: Replica, number: int) -> ReplicaState:
    if one.given_up or one.lost is not None:
        state = "given up" if one.given_up else "lost"
    elif one.works and one.asleep:
        state = "asleep"
    elif one.works:
        state = "stalled" if one.stalled else "leaving" if one.leaving else "works"
    else:
        state = "starts"
    shown = ReplicaState(number, state, one.progress.phase, one.progress.fraction)
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
    return Histogram(tuple(histogram.bounds), histogram.buckets.counts)


router = APIRouter(route_class=Endpoint, tags=["page"], include_in_schema=False)
events = APIRouter(route_class=Endpoint, tags=["Health and administration"])

FOLDER = Path(__file__).parent / "files"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_UNSENT = re.compile(r"^ *(?:(?://|/\*\*|\*[ /]).*)?\n|^ +|  // .*$", re.MULTILINE)
"""Comments of scripts, indentation and empty lines, which browsers are not sent."""
_ALLOWED = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _ALLOWED,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
INDEX_HEADERS = {**_HEADERS, "Cache-Control": "no-cache"}
_FILE_HEADERS = {**_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}

WATCH = Watch()


class PageFiles(NamedTuple):
    html: bytes
    """The page while nothing is known of the model."""
    chat_html: bytes
    """The page of a model that writes: its chat is seen before a script has run."""
    digest: str
    """The part of the other files' addresses that changes with any of them."""
    files: dict[str, tuple[bytes, str]]
    """Content and media type of the other files by path."""


@cache
def page_files() -> PageFiles:
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in MEDIA_TYPES)
    texts = {path.relative_to(FOLDER).as_posix(): _sent(path) for path in paths}
    page = texts.pop("index.html")
    styles = [
        texts.pop(name) for name in sorted(texts, key=lambda name: name != "style.css") if ".css" in name
    ]
    texts["style.css"] = "".join(styles)
    texts |= join_scripts({name: text for name, text in texts.items() if name.endswith(".js")}, "app.js")
    files = {name: (text.encode(), MEDIA_TYPES[Path(name).suffix]) for name, text in texts.items()}
    digest = hashlib.sha256(b"\0".join(content for content, _ in files.values())).hexdigest()[:16]
    page = page.replace("{digest}", digest)
    hidden, shown = (page.replace("{hidden}", each).encode() for each in (" hidden", ""))
    return PageFiles(hidden, shown, digest, files)


def _sent(path: Path) -> str:
    text = path.read_text("utf-8")
    return _UNSENT.sub("", text) if path.suffix == ".js" else text


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    files = page_files()
    html = files.chat_html if _writes(request.app.state.frontend) else files.html
    return Response(html, media_type="text/html", headers=INDEX_HEADERS)


def _writes(frontend: Frontend | ManyModels) -> bool:
    """Whether the first model is known to generate text."""
    if frontend.status.refuses:
        return False
    served = frontend.states if isinstance(frontend, ManyModels) else [frontend.facts]
    return any("generate" in first.tasks for first in served[:1])


@router.get("/page/{digest}/{name:path}")
async def page_file(digest: str, name: str) -> Response:
    page = page_files()
    if digest != page.digest or name not in page.files:
        raise NotFound("The page has no such file; load it again.")
    content, media_type = page.files[name]
    return Response(content, media_type=media_type, headers=_FILE_HEADERS)


@events.get("/live/events")
async def live_events(request: Request) -> Response:
    """Stream what the server does now, an event a second: its state, counts of tokens, steps, replicas."""
    return EventStream(WATCH.begin(request.app.state.frontend))
