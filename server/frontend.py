"""Tokens in, text out: what every endpoint and `LLM` build on. Knows no HTTP; knows one engine.

Takes a request only if the engine is ready and its queue not full, follows it until its last delta, and tells
the engine at once when nobody waits for the rest.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from engine_core.client.client import EngineClient
from engine_core.client.streams import Stream
from engine_core.protocol import Failed, Pooled, Tokens
from server.errors import NotFound, Overloaded, Unavailable, from_engine
from server.merging import merged
from server.metrics import Metrics, RequestRecord
from server.options.table import ServerConfig
from server.requests.facts import Facts
from server.requests.loading import find_facts, find_folder, open_tokenizer
from server.requests.pooling import Item
from server.requests.sampling import SamplingParams
from server.status import Dead, Draining, Ready, Starting, Status
from server.text.output import Delta, TextOutput
from server.text.tokenizer import Tokenizer
from worker.protocol import Sampling

_log = logging.getLogger(__name__)

DEFAULT_QUEUE = 8192
"""Waiting requests when --max-num-queued-reqs is not given: beyond any wait a client would sit through."""


POOLING_WINDOW = 2
"""How many steps' worth of one request's texts are in the engine at once: the next step is never short of
them, and whoever comes after a request of ten thousand texts waits for few of them."""


class Placement(TypedDict):
    """When and where the engines run a request."""

    priority: int
    salt: str
    replica: int | None


@dataclass(frozen=True, slots=True)
class Work:
    """A request that was found right: one choice for each of `params`."""

    prompt: list[int]
    sampling: SamplingParams
    params: list[Sampling]
    placement: Placement
    interval: int
    request_id: str


class Frontend:
    def __init__(self, config: ServerConfig, client: EngineClient, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.live = 0
        """Choices that are being generated, and texts that are being pooled."""
        self._client = client
        self.folder = Path()
        """The checkpoint's folder on this machine, once it is known."""
        self._facts: Facts | None = None
        self._tokenizer: Tokenizer | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests: dict[str, set[int]] = {}
        self._pace = Pace()
        metrics.watch(lambda: client.replicas)

    async def start(self) -> None:
        """Waits for an engine, and loads the tokenizer meanwhile. Raises Unavailable if all are dead."""
        if self.config.replicas.here:
            await self._client.folder_known.wait()
            self._raise_if_dead()
            self.folder = Path(self._client.folder)
        else:
            self.folder = await asyncio.to_thread(find_folder, self.config)
        self._tokenizer = await asyncio.to_thread(open_tokenizer, self.config, self.folder)
        await self._client.ready_or_dead.wait()
        self._raise_if_dead()
        self._learn()
        self._client.on_change = self._learn

    def _learn(self) -> None:
        """What can be asked for depends on which replicas work. While there is none, the last still holds."""
        if self._client.ready is not None and self._tokenizer is not None:
            self._facts = find_facts(self.config, self._client.ready, self.folder, self._tokenizer)

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            self.require_ready()
            raise Unavailable("The model is not loaded yet.", retry_after=1)
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self.require_ready()
            raise Unavailable("The tokenizer is not loaded yet.", retry_after=1)
        return self._tokenizer

    @property
    def status(self) -> Status:
        if self._client.dead is not None:
            return Dead(self._client.dead)
        if self._draining:
            return Draining()
        if self._client.ready is not None:
            return Ready() if self._facts is not None else Starting("tokenizer", 0.0)
        return Starting(self._client.progress.stage, self._client.progress.fraction)

    def require_ready(self) -> None:
        match self.status:
            case Starting(stage, fraction):
                raise Unavailable(
                    f"The model is still loading (stage {stage}, {fraction:.0%}). GET /ready tells when it "
                    "is done.",
                    retry_after=2,
                )
            case Draining():
                raise Unavailable(
                    "The server is shutting down. Try again later or on another instance.", retry_after=5
                )
            case Dead(reason):
                raise Unavailable(f"The engine has stopped: {reason}", retry_after=10)
            case Ready():
                pass

    def check_model(self, name: str | None) -> None:
        """None is the served model."""
        names = self.facts.model_names
        if name is not None and name not in names:
            raise NotFound(f"The model `{name}` does not exist. Valid aliases: {', '.join(names)}", "model")

    def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        interval: int = 1,
        request_id: str = "",
        replica: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of all n choices as they come. Closing the generator ends the request in the engine.

        Checks at once and raises here what is wrong with the request; sends it with the first step of the
        generator. Deltas hold at least `interval` tokens, but for the first and the last of a choice. No
        replica but the one that is named runs it.
        """
        self.require_ready()
        params = sampling.resolve(self.facts, self.tokenizer, len(prompt))
        self._admit(len(params))
        if self.config.enable_log_requests:
            _log.info(
                "request %s: %d prompt tokens, %d x %s", request_id, len(prompt), len(params), params[0]
            )
        placement: Placement = {"priority": priority, "salt": salt, "replica": replica}
        work = Work(prompt, sampling, params, placement, interval, request_id)
        return self._generate(work, 0) if len(params) == 1 else self._generate_all(work)

    async def pool(
        self,
        items: Sequence[Item],
        *,
        priority: int = 0,
        salt: str = "",
        request_id: str = "",
        replica: int | None = None,
    ) -> list[Pooled]:
        """What became of each item, in order. All or nothing: the first failure ends the others."""
        self.require_ready()
        window = POOLING_WINDOW * self.facts.ready.worker.max_num_seqs
        self._admit(min(len(items), window))
        if self.config.enable_log_requests:
            _log.info("request %s: %d texts to pool, %s", request_id, len(items), items[0].params)
        answers: list[Pooled] = []
        waiting: deque[tuple[Stream[Pooled], float]] = deque()
        try:
            while len(answers) < len(items):
                sent = len(answers) + len(waiting)
                if len(waiting) <= window // 2 and sent < len(items):
                    batch = [(one.tokens, one.params) for one in items[sent : len(answers) + window]]
                    streams = self._client.submit_many(batch, priority=priority, salt=salt, replica=replica)
                    waiting.extend((stream, time.monotonic()) for stream in streams)
                    self._enter(request_id, streams)
                stream, since = waiting[0]
                answers.append(await self._pooled(stream, len(items[len(answers)].tokens), since))
                waiting.popleft()
                self._leave(request_id, [stream])
        finally:
            left = [stream for stream, _ in waiting]
            self._client.abort([stream.id for stream in left])
            self._leave(request_id, left)
        return answers

    async def _pooled(self, stream: Stream[Pooled], tokens: int, since: float) -> Pooled:
        answer = await anext(stream)
        if isinstance(answer, Failed):
            self.metrics.finished("error")
            raise from_engine(answer.code, answer.message)
        self.metrics.pooled(tokens, answer.cached, time.monotonic() - since, answer.timing)
        self._pace.finished()
        return answer

    async def abort(self, request_ids: Iterable[str]) -> int:
        """Ends these requests; their streams finish with "abort". Returns how many were found."""
        found = [self._requests[id] for id in request_ids if id in self._requests]
        self._client.abort([stream for streams in found for stream in streams])
        return len(found)

    def begin_drain(self) -> None:
        self._draining = True

    async def drained(self) -> None:
        """Waits until no request runs."""
        await self._idle.wait()

    async def _generate_all(self, work: Work) -> AsyncGenerator[Delta, None]:
        choices = [self._generate(work, index) for index in range(len(work.params))]
        async with aclosing(merged(choices)) as deltas:
            async for _, delta in deltas:
                yield delta

    async def _generate(self, work: Work, index: int) -> AsyncGenerator[Delta, None]:
        """One choice."""
        prompt, params, eos = work.prompt, work.params[index], self.facts.eos_token_ids
        stream = self._client.submit(prompt, params, **work.placement)
        text = TextOutput(index, prompt, work.sampling, self.tokenizer, eos, work.interval)
        choice = Choice(text, self.metrics.begin(len(prompt), len(work.params), params.max_tokens))
        self._enter(work.request_id, [stream])
        try:
            async for new in stream:
                delta = choice.push(new)
                if choice.finished:
                    self._pace.finished()
                    self._client.abort([stream.id])  # of a stop string the engine does not know yet
                if delta is not None:
                    yield delta
                if choice.finished:
                    return
        finally:
            self._client.abort([stream.id])
            self._leave(work.request_id, [stream])
            choice.close()

    def _enter(self, request_id: str, streams: Sequence[Stream[Any]]) -> None:
        self.live += len(streams)
        self._idle.clear()
        if request_id:
            self._requests.setdefault(request_id, set()).update(stream.id for stream in streams)

    def _leave(self, request_id: str, streams: Sequence[Stream[Any]]) -> None:
        self.live -= len(streams)
        if not self.live:
            self._idle.set()
        if request_id and streams:
            mine = self._requests[request_id]
            mine.difference_update(stream.id for stream in streams)
            if not mine:
                del self._requests[request_id]

    def _admit(self, count: int) -> None:
        """Refuses what would wait behind a full queue, before it costs the engine anything."""
        given = self.config.engine.max_num_queued_reqs
        # Our own count is exact but knows of no memory shortage; the engine's does, a moment late.
        reported = self._client.stats.waiting if self._client.stats else 0
        slots = self.facts.ready.worker.max_num_seqs
        waiting = max(self.live + count - slots, reported + count if reported else 0)
        if waiting > (DEFAULT_QUEUE if given is None else given):
            self.metrics.rejected()
            raise Overloaded(
                "The engine is currently busy and cannot accept new requests. Please try again later or on a "
                "different instance.",
                retry_after=self._pace.seconds_for(waiting),
            )

    def _raise_if_dead(self) -> None:
        if self._client.dead is not None:
            raise Unavailable(self._client.dead)


class Choice:
    """One of the n answers to a request, on its way."""

    __slots__ = ("_record", "_text", "finished")

    def __init__(self, text: TextOutput, record: RequestRecord) -> None:
        self.finished = False
        self._text = text
        self._record = record

    def push(self, new: Tokens | Failed) -> Delta | None:
        if isinstance(new, Failed):
            self._record.finish("error", None)
            self.finished = True
            raise from_engine(new.code, new.message)
        before = self._text.count
        delta = self._text.push(new)
        self._record.tokens(self._text.count - before, new.cached)
        if delta is not None and delta.finish_reason is not None:
            self.finished = True
            self._record.finish(delta.finish_reason, new.timing)
        return delta

    def close(self) -> None:
        if not self.finished:
            self._record.finish("abort", None)


class Pace:
    """How fast requests are finished lately: what a refused client is told to wait."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def finished(self) -> None:
        self._times.append(time.monotonic())

    def seconds_for(self, waiting: int) -> int:
        if len(self._times) < 2:
            return 5
        each = (time.monotonic() - self._times[0]) / len(self._times)
        return min(60, max(1, math.ceil(each * waiting)))
