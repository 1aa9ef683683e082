"""Sends the prompts and the texts of an ask to engines: tokens in, text out. Asks alone call it.

A request is sent only if the engine is ready, followed until its last delta, and the engine is told at once
when nobody waits for the rest.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import islice, repeat
from typing import Protocol, Unpack

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import AddOptions, Stream
from engine_core.protocol import Failed, Pooled, Tokens
from server.access.admission import Admission, Admissions
from server.access.client_identity import Caller, of_later_texts
from server.errors import from_engine
from server.frontend.beam_requests import BeamRequests, last_answer
from server.frontend.merged_generators import merged
from server.frontend.text_output import ALL_TOKENS, CheckedPrompt, Choice, Delta
from server.media.media_cache import KeptItem as MediaItem
from server.metrics.server_metrics import Metrics
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.requests.beam_search import BeamParams, BeamRules, read_rules
from server.requests.pooling import TOKENS_AT_ONCE, PooledText, items_to_send
from server.requests.sampling_params import SamplingParams
from server.requests.timing import sent_later
from server.text.tokenizer import TokenIds, Tokenizer, count_ids, unpack
from worker.protocol import Sampling

_log = logging.getLogger(__name__)

POOLING_WINDOW = 2
"""Steps' worth of a request's texts that are in the engine at once, so that others need not wait for all."""


class Served(Protocol):
    """What requests need of a frontend."""

    config: ServerConfig
    client: EngineClient
    metrics: Metrics
    admissions: Admissions
    facts: Facts
    tokenizer: Tokenizer

    def require_ready(self) -> None: ...


class EngineRequests:
    """What one frontend sends: of requests that were admitted, whose places are given back by whoever has
    admitted them. Those of a choice are given back when it ends."""

    __slots__ = ("_frontend",)

    def __init__(self, frontend: Served) -> None:
        self._frontend = frontend

    def generate(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        admission: Admission,
        *,
        params: list[Sampling] | None = None,
        interval: int = 1,
        replica: int | None = None,
        beams: BeamParams | None = None,
        **options: Unpack[AddOptions],
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of all n choices as they come. Closing the generator ends the request.

        The request is checked at once, unless `params` says what `sampling` resolves to, and sent when the
        first delta is asked for. A delta has `interval` tokens at least, unless it is the first or the last
        of its choice; ALL_TOKENS tells the engine that nobody reads them as they come. `options` go to the
        engine as they are. `admission` has a place for each choice. With `beams` a search finds the choices,
        and the best one comes first.
        """
        frontend = self._frontend
        frontend.require_ready()
        facts, length = frontend.facts, count_ids(prompt)
        params = params or sampling.resolve(facts, frontend.tokenizer, length)
        rules = beams and read_rules(beams, sampling, params[0], length, facts, options)
        admission.check()
        if frontend.config.log.enable_log_requests:
            _log.info("request %s: %d prompt tokens, %d x %s", admission.id, length, len(params), params[0])
        options["streams"] = interval < ALL_TOKENS
        options["most_guesses"] = sampling.speculative_tokens
        options["times_each"] = bool(sampling.stop)  # a stop string ends the text here, before the engine
        asked = CheckedPrompt(prompt, sampling, params, interval, replica, options, admission)
        if facts.sources is not None:
            asked.read_by_encoder(facts.sources)
        if len(params) == 1 and rules is None:
            deltas = self._generate(asked, 0)
        else:
            options.setdefault("group", frontend.client.new_number())
            deltas = self._generate_all(asked) if rules is None else self._search(asked, rules)
        return _logged(deltas, admission.id) if frontend.config.log.enable_log_outputs else deltas

    async def _generate_all(self, asked: CheckedPrompt) -> AsyncGenerator[Delta, None]:
        own, client = asked.admission, self._frontend.client
        own.check()
        prompt = unpack(asked.prompt)
        sent = [(prompt, params) for params in asked.params]
        streams: list[Stream[Tokens]] = client.submit_all(sent, replica=asked.replica, **asked.options)
        numbers = [stream.id for stream in streams]
        own.streams.update(numbers)
        try:
            choices = [self._generate(asked, index, stream) for index, stream in enumerate(streams)]
            async with aclosing(merged(choices)) as deltas:
                async for _, delta in deltas:
                    yield delta
        finally:
            client.abort(numbers)
            own.streams.difference_update(numbers)

    async def _generate(
        self, asked: CheckedPrompt, index: int, stream: Stream[Tokens] | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of one choice, which is sent first unless it has a stream already."""
        frontend, admission = self._frontend, asked.admission
        admission.check()
        if stream is None:
            given = unpack(asked.prompt), asked.params[index]
            stream = frontend.client.submit(*given, replica=asked.replica, **asked.options)
        eos = frontend.facts.eos_token_ids
        choice = Choice(asked, index, frontend.metrics, frontend.tokenizer, eos)
        admission.streams.add(stream.id)
        try:
            async for new in stream:
                if isinstance(new, Failed):
                    choice.fail()
                    raise from_engine(new, frontend.admissions.seconds_to_wait())
                delta = choice.push(new)
                if choice.finished:
                    frontend.client.abort([stream.id])  # the engine knows of no stop strings
                if delta is not None:
                    yield delta
                if choice.finished:
                    return
        finally:
            frontend.client.abort([stream.id])
            admission.streams.discard(stream.id)
            choice.close()
            admission.shrink(admission.count - 1)

    async def _search(self, asked: CheckedPrompt, rules: BeamRules) -> AsyncGenerator[Delta, None]:
        """Yields the answers that a beam search finds."""
        frontend = self._frontend
        given = frontend.metrics, frontend.tokenizer, frontend.facts.eos_token_ids
        choices = [Choice(asked, index, *given) for index in range(len(asked.params))]
        wait = frontend.admissions.seconds_to_wait
        found = BeamRequests(frontend.client, asked, rules, wait).deltas(choices)
        async with aclosing(found) as deltas:
            async for delta in deltas:
                yield delta

    def places_for(self, texts: int, caller: Caller) -> int:
        """The places that a request needs for so many texts: only some of many are in the engine at once."""
        frontend = self._frontend
        window = POOLING_WINDOW * frontend.facts.ready.worker.max_num_seqs
        most = min(window, frontend.admissions.most_for(caller))
        return max(1, min(texts, most))

    async def pool(
        self,
        items: Sequence[PooledText],
        admission: Admission,
        *,
        replica: int | None = None,
        media_items: Mapping[bytes, MediaItem] = {},
        tell: Callable[[], None] = lambda: None,
        **options: Unpack[AddOptions],
    ) -> list[Pooled]:
        """Returns the result of each item, in order. The first failure ends the others and is raised.

        `admission` has `places_for` the items: so many are in the engine at once. The time for which the
        others wait here counts as queued. `media_items` has their media by their hashes.
        """
        frontend = self._frontend
        frontend.require_ready()
        admission.check()
        if frontend.config.log.enable_log_requests:
            _log.info("request %s: %d texts to pool, %s", admission.id, len(items), items[0].params)
        answers: list[Pooled] = []
        window = self.places_for(len(items), admission.caller)
        began = time.monotonic()
        waiting: deque[tuple[Stream[Pooled], float]] = deque()
        try:
            while len(answers) < len(items):
                sent = len(answers) + len(waiting)
                if len(waiting) <= window // 2 and sent < len(items):
                    batch = items_to_send(items, sent, len(answers) + window, media_items)
                    told = of_later_texts(options, time.monotonic() - began) if sent else options
                    streams = frontend.client.submit_many(batch, replica=replica, **told)
                    waiting.extend(zip(streams, repeat(time.monotonic() if sent else began)))
                    admission.streams.update([stream.id for stream in streams])
                stream, since = waiting[0]
                answer = await anext(stream)
                if isinstance(answer, Failed):
                    frontend.metrics.finished("error")
                    admission.check()
                    raise from_engine(answer, frontend.admissions.seconds_to_wait())
                admission.begun, took = True, time.monotonic() - since
                frontend.metrics.pooled(items[len(answers)].length, answer.cached, took, answer.timing)
                answers.append(sent_later(answer, since - began) if since > began else answer)
                waiting.popleft()
                admission.streams.discard(stream.id)
                tell()
        finally:
            frontend.client.abort(left := [stream.id for stream, _ in waiting])
            admission.streams.difference_update(left)
        return answers

    async def tell(
        self,
        prompts: Iterator[tuple[list[int], Sampling, *tuple[int, ...]]],
        lengths: Sequence[int],
        admission: Admission,
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Tokens | Failed]:
        """Returns what an engine says of the token behind each prompt, in order. The parameters of each ask
        for one token. Prompts, whose `lengths` are known, are made when they are sent, with the lengths of
        the beginnings that they share.

        `admission` has `places_for` the prompts: so many are in the engine at once. `options` are of all.
        """
        frontend, client = self._frontend, self._frontend.client
        frontend.require_ready()
        admission.check()
        answers: list[Tokens | Failed] = []
        waiting: deque[Stream[Tokens]] = deque()
        window, began = self.places_for(len(lengths), admission.caller), time.monotonic()
        try:
            while len(answers) < len(lengths):
                sent = len(answers) + len(waiting)
                if len(waiting) <= window // 2 and sent < len(lengths):
                    turn = max(1, TOKENS_AT_ONCE // lengths[sent])
                    batch = list(islice(prompts, min(window - len(waiting), turn)))
                    told = of_later_texts(options, time.monotonic() - began) if sent else options
                    waiting.extend(client.submit_all(batch, replica=replica, **told))
                    admission.streams.update([stream.id for stream in waiting])
                stream = waiting.popleft()
                answer = await last_answer(stream)
                admission.streams.discard(stream.id)
                admission.check()
                if not isinstance(answer, Failed) and answer.finish == "abort":
                    answer = Failed(stream.id, 503, "the request was ended before it was done")
                if isinstance(answer, Failed):
                    frontend.metrics.finished("error")
                else:
                    took = time.monotonic() - began
                    frontend.metrics.pooled(lengths[len(answers)], answer.cached, took, answer.timing)
                    admission.begun = True
                answers.append(answer)
        finally:
            client.abort(left := list(admission.streams))
            admission.streams.difference_update(left)
        return answers


async def _logged(deltas: AsyncGenerator[Delta, None], name: str) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of a request, and logs the text of each choice that has ended."""
    texts: defaultdict[int, str] = defaultdict(str)
    async with aclosing(deltas):
        async for delta in deltas:
            texts[delta.index] += delta.text
            if reason := delta.finish_reason:
                _log.info("request %s: choice %d, %s: %r", name, delta.index, reason, texts[delta.index])
            yield delta
