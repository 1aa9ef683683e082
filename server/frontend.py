"""Tokens in, text out: every endpoint and `AsyncLLM` build on this. Knows no HTTP; knows one engine client.

Takes a request only if the engine is ready and its queue not full, follows it until its last delta, and tells
the engine at once when nobody waits for the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from msgspec.structs import replace

from engine_core.client.client import AddOptions, EngineClient
from engine_core.client.streams import Stream
from engine_core.protocol import Failed, Pooled, Tokens
from server.errors import NotFound, Unavailable, from_engine
from server.merging import merged
from server.metrics import Metrics, RequestRecord
from server.options.table import ServerConfig
from server.requests.facts import Facts
from server.requests.loading import find_facts, find_folder, open_tokenizer
from server.requests.overload import OverloadGuard
from server.requests.pooling import Item
from server.requests.sampling import SamplingParams
from server.status import Dead, Draining, Ready, Starting, Status
from server.text.output import ALL_TOKENS, Delta, TextOutput
from server.text.tokenizer import Tokenizer
from worker.protocol import Sampling

_log = logging.getLogger(__name__)

POOLING_WINDOW = 2
"""Steps' worth of one request's texts that are in the engine at once. The next step is never short of texts,
and a request that comes after one of ten thousand texts waits for few of them."""


@dataclass(frozen=True, slots=True)
class Work:
    """A checked request: one choice for each of `params`."""

    prompt: list[int]
    sampling: SamplingParams
    params: list[Sampling]
    interval: int
    request_id: str
    replica: int | None
    options: AddOptions


class Frontend:
    def __init__(self, config: ServerConfig, client: EngineClient, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.live = 0
        """Number of choices that are being generated and of texts that are being pooled."""
        self._client = client
        self.folder = Path()
        """The checkpoint's folder on this machine, once it is known."""
        self._facts: Facts | None = None
        self._tokenizer: Tokenizer | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests: dict[str, set[int]] = {}
        self._overload = OverloadGuard(
            config.engine.max_num_queued_reqs, metrics.rejected, lambda: client.replicas
        )
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
        self._update_facts()
        self._client.on_change = self._update_facts

    def _update_facts(self) -> None:
        """Reads the facts again: which replicas work decides them. While none does, the last ones stay."""
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
        return Starting(self._client.progress.phase, self._client.progress.fraction)

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
        """Raises NotFound unless `name` is a name of the served model, or None."""
        names = self.facts.model_names
        if name is not None and name not in names:
            raise NotFound(f"The model `{name}` does not exist. Valid aliases: {', '.join(names)}", "model")

    def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        interval: int = 1,
        request_id: str = "",
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of all n choices as they come. Closing the generator ends the request.

        The request is checked at once, and sent when the generator is first asked for a delta. A delta holds
        at least `interval` tokens, unless it is the first or the last of its choice; one of ALL_TOKENS tells
        the engine that nobody reads them as they come. `replica` names the only replica that may run the
        request, and `options` go to the engine as they are.
        """
        self.require_ready()
        params = sampling.resolve(self.facts, self.tokenizer, len(prompt))
        self._refuse_if_busy(len(params))
        if self.config.enable_log_requests:
            _log.info(
                "request %s: %d prompt tokens, %d x %s", request_id, len(prompt), len(params), params[0]
            )
        options["streams"] = interval < ALL_TOKENS
        options["times_each"] = bool(sampling.stop)  # a stop string ends the text here, before the engine
        work = Work(prompt, sampling, params, interval, request_id, replica, options)
        if len(params) == 1:
            return self._generate(work, 0)
        options.setdefault("group", self.new_group())
        return self._generate_all(work)

    def new_group(self) -> int:
        """A number for the option `group` of all prompts, or all texts, of one request."""
        return self._client.new_number()

    async def pool(
        self,
        items: Sequence[Item],
        *,
        request_id: str = "",
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Pooled]:
        """Returns the result of each item, in order. The first failure ends the others and is raised.

        The time for which an item waited here, because many were before it, counts as queued.
        """
        self.require_ready()
        window = POOLING_WINDOW * self.facts.ready.worker.max_num_seqs
        self._refuse_if_busy(min(len(items), window))
        if self.config.enable_log_requests:
            _log.info("request %s: %d texts to pool, %s", request_id, len(items), items[0].params)
        answers: list[Pooled] = []
        began = time.monotonic()
        waiting: deque[tuple[Stream[Pooled], float]] = deque()
        try:
            while len(answers) < len(items):
                sent = len(answers) + len(waiting)
                if len(waiting) <= window // 2 and sent < len(items):
                    batch = [(one.tokens, one.params) for one in items[sent : len(answers) + window]]
                    streams = self._client.submit_many(batch, replica=replica, **options)
                    since = time.monotonic() if sent else began
                    waiting.extend((stream, since) for stream in streams)
                    self._enter(request_id, streams)
                stream, since = waiting[0]
                answer = await self._pooled(stream, len(items[len(answers)].tokens), since)
                answers.append(_sent_later(answer, since - began) if since > began else answer)
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
        """Yields the deltas of one choice."""
        prompt, params, eos = work.prompt, work.params[index], self.facts.eos_token_ids
        options = work.options.copy()
        if index:
            options.pop("diagnoses", None)  # the first choice tells for all
        stream = self._client.submit(prompt, params, replica=work.replica, **options)
        text = TextOutput(index, prompt, work.sampling, self.tokenizer, eos, work.interval)
        choice = Choice(text, self.metrics.begin(len(prompt), len(work.params), params.max_tokens))
        self._enter(work.request_id, [stream])
        try:
            async for new in stream:
                delta = choice.push(new)
                if choice.finished:
                    self._client.abort([stream.id])  # a stop string ended it, which the engine does not know
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

    def _refuse_if_busy(self, new: int) -> None:
        slots = self.facts.ready.worker.max_num_seqs
        reported = self._client.stats.waiting if self._client.stats else 0
        self._overload.check(new, self.live, slots, reported)

    def _raise_if_dead(self) -> None:
        if self._client.dead is not None:
            raise Unavailable(self._client.dead)


def _sent_later(answer: Pooled, seconds: float) -> Pooled:
    """The answer to a text that waited here for so long, with times that begin before the wait."""
    timing, expected = answer.timing, answer.expected
    return replace(
        answer,
        timing=None if timing is None else replace(timing, queued=timing.queued + seconds),
        expected=None if expected is None else expected + seconds,
    )


class Choice:
    """One of the n answers to a request while it is generated: its text and its times."""

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
