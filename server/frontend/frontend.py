"""Tokens in, text out: every endpoint and `AsyncLLM` build on this. Knows no HTTP; knows one engine client.

Takes a request only if the engine is ready and its queue not full, follows it until its last delta, and tells
the engine at once when nobody waits for the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import AddOptions, Stream
from engine_core.protocol import Failed, Pooled, Tokens
from server.access.admission import Admission, Admissions
from server.access.client_identity import ANYONE, Caller, of_later_texts
from server.access.keyring import Access
from server.errors import ASLEEP, READY, NoEngine, NotFound, Status, Unavailable, from_engine, loading
from server.frontend.asks import Ask
from server.frontend.beam_requests import BeamRequests
from server.frontend.media_readers import open_inputs
from server.frontend.merged_generators import merged
from server.frontend.text_output import ALL_TOKENS, CheckedPrompt, Choice, Delta
from server.grammar_checks.grammar_checker import ModelGrammars
from server.helpers.job_queue import Helpers
from server.media.media_cache import KeptItem as MediaItem
from server.metrics.server_metrics import Metrics
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.reading.long_bodies import LongBodies
from server.reading.prompts import ReadingContext, ReadingOptions
from server.requests.beam_rounds import BeamParams, BeamRules
from server.requests.beam_search import read_rules
from server.requests.checkpoint_facts import find_facts, find_folder, load_tokenizer, tokenizer_files
from server.requests.pooling import PooledText, items_to_send
from server.requests.sampling_params import SamplingParams
from server.requests.timing import sent_later
from server.text.tokenizer import TokenIds, Tokenizer, count_ids, unpack
from server.text.tokenizer_files import TokenizerFiles
from worker.protocol import Sampling

if TYPE_CHECKING:
    from server.frontend.transcriber import Transcriber
    from server.media.media_reader import MediaReader

_log = logging.getLogger(__name__)

POOLING_WINDOW = 2
"""Steps' worth of a request's texts that are in the engine at once, so that others need not wait for all."""


R = TypeVar("R")


class Frontend:
    facts: Facts
    """What is known of the model, once an engine is ready. Before that it is missing, as the next two may be,
    and whoever reads it gets the error that says why."""
    tokenizer: Tokenizer
    reading_context: ReadingContext
    """The tools that read the texts of requests."""

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        metrics: Metrics,
        access: Access | None = None,
    ) -> None:
        """`access`: who may use a server of several models, of which this is one."""
        self.is_one_of_several = access is not None
        self.config, self.metrics, self._client = config, metrics, client
        self.folder = Path()
        """The checkpoint's folder on this machine, once it is known."""
        self._has_facts = False
        self._source: TokenizerFiles | None = None
        self._reading = ReadingOptions.of(config)
        self.helpers = Helpers(config.log.style)
        """All helper processes of this frontend."""
        self.long_bodies = LongBodies(self.helpers, self._tokenizer_files, self._reading)
        """Reads the bodies of requests that are too long for the event loop."""
        self.media: MediaReader | None = None
        """What reads media; None if the model takes only texts."""
        self.transcriber: Transcriber | None = None
        """What reads recordings, if the model transcribes them."""
        self.adapters: Any = None  # ServedAdapters, if requests may name some
        self.grammars = ModelGrammars(self, client, config, self.helpers)
        self._draining: Status | None = None
        self._restarting_since = 0.0
        self.access = access or Access(config.access, metrics.key_counters)
        self.admissions = Admissions(
            config.engine.max_num_queued_reqs, config.engine.max_num_queued_tokens, client, metrics.rejected
        )
        self.idle = self.admissions.idle
        """Set while no request runs."""
        self.orders, self.call_workers, self.client = client.orders, client.call_workers, client
        metrics.watch(lambda: client.replicas, config.engine.worker.lora.most_in_step)

    async def start(self, *, reads_bodies: bool = True) -> None:
        """Waits for an engine, and loads the tokenizer meanwhile. Raises Unavailable if all are dead.

        `reads_bodies`: whether requests come as bodies, which may be long.
        """
        if self.config.replicas.here:
            await self._client.folder_known.wait()
            self._raise_if_dead()
            self.folder = Path(self._client.folder)
        else:
            self.folder = await asyncio.to_thread(find_folder, self.config)
        self._source = await asyncio.to_thread(tokenizer_files, self.config, self.folder)
        if reads_bodies and self.config.engine.worker.kv_cache_dir is not None:  # which is for long prompts
            self.long_bodies.start()
        self.tokenizer = await load_tokenizer(self._source, self.config)
        await self._client.ready_or_dead.wait()
        self._raise_if_dead()
        self._update_facts()
        self._client.on_change = self._update_facts

    def _update_facts(self) -> None:
        """Reads the facts again: which replicas work decides them. While none does, the last ones stay."""
        if self._client.ready is not None:
            found = find_facts(self.config, self._client.ready, self.folder, self.tokenizer)
            self.facts = open_inputs(self, found, self.tokenizer, self._client)
            self._has_facts = True
            self.reading_context = ReadingContext(self.facts, self.tokenizer, self._reading)
            self.admissions.slots = self.facts.ready.worker.max_num_seqs
            if self._restarting_since:
                _log.info("requests run again, after %.1f s", time.monotonic() - self._restarting_since)
            self._restarting_since = 0.0
        elif not self._restarting_since:
            self._restarting_since = time.monotonic()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raises the error for an attribute that has not been set yet, as Python calls this for no
            others."""
            if name not in Frontend.__annotations__:
                raise AttributeError(name)
            self.require_ready()
            what = "tokenizer" if name == "tokenizer" else "model"
            raise Unavailable(f"The {what} is not loaded yet.", retry_after=1)

    def _tokenizer_files(self) -> TokenizerFiles:
        if self._source is None:
            raise Unavailable("The tokenizer is not loaded yet.", retry_after=1)
        return self._source

    @property
    def live(self) -> int:
        """The number of choices and of texts that requests are here for."""
        return self.admissions.live

    @property
    def status(self) -> Status:
        if self._client.dead is not None:
            return Status("dead", "engine_given_up", fraction=0.0, refuses=True)
        if self._draining is not None:
            return self._draining
        if self.orders.asleep:
            return ASLEEP
        if self._has_facts and (reason := self._client.restarting) is not None:
            state = "stalled" if reason == "engine_stalled" else "restarting"
            return Status(state, reason, fraction=0.0, since=self._restarting_since)
        if self._client.ready is not None:
            if self.adapters is not None and not self.adapters.has_started:
                return loading("adapters", 0.0)
            return READY if self._has_facts else loading("tokenizer", 0.0)
        return loading(self._client.progress.phase, self._client.progress.fraction)

    def require_ready(self) -> None:
        """Raises Unavailable if requests are refused. While an engine is started again, they are let in."""
        if (status := self.status) is not READY:
            status.raise_if_refused()

    def check_model(self, name: str | None) -> None:
        """Raises NotFound unless `name` is a name of the served model, or None or empty."""
        if self.is_one_of_several:
            return  # the request is here because of the name
        names = self.facts.model_names
        if name and not self.facts.is_name(name) and not self.config.is_own_path(name):
            raise NotFound(f"The model `{name}` does not exist. Valid aliases: {', '.join(names)}", "model")

    def ask(self, asked: Ask[R]) -> Awaitable[R]:
        """Checks and admits a request, and returns its answer while it comes. Raises ApiError."""
        return asked.open(self)

    def generate(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        params: list[Sampling] | None = None,
        interval: int = 1,
        request_id: str = "",
        replica: int | None = None,
        admission: Admission | None = None,
        beams: BeamParams | None = None,
        **options: Unpack[AddOptions],
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of all n choices as they come. Closing the generator ends the request.

        The request is checked at once, unless `params` says what `sampling` resolves to, and sent when the
        first delta is asked for. A delta has `interval` tokens at least, unless it is the first or the last
        of its choice; ALL_TOKENS tells the engine that nobody reads them as they come. `options` go to the
        engine as they are. `admission` has a place for each choice; without it they are found here. With
        `beams` a search finds the choices, and the best one comes first.
        """
        self.require_ready()
        params = params or sampling.resolve(self.facts, self.tokenizer, count_ids(prompt))
        rules = beams and read_rules(beams, sampling, params[0], count_ids(prompt), self.facts, options)
        if admission is None:
            self.admissions.check(ANYONE, len(params))
        else:
            admission.check()
        if self.config.log.enable_log_requests:
            told = request_id, count_ids(prompt), len(params), params[0]
            _log.info("request %s: %d prompt tokens, %d x %s", *told)
        options["streams"] = interval < ALL_TOKENS
        options["most_guesses"] = sampling.speculative_tokens
        options["times_each"] = bool(sampling.stop)  # a stop string ends the text here, before the engine
        asked = CheckedPrompt(prompt, sampling, params, interval, request_id, replica, options, admission)
        if self.facts.sources is not None:
            asked.read_by_encoder(self.facts.sources)
        if len(params) == 1 and rules is None:
            return self._generate(asked, 0)
        options.setdefault("group", self.new_group())
        return self._generate_all(asked) if rules is None else self._search(asked, rules)

    def new_group(self) -> int:
        """A number for the option `group` of all prompts, or all texts, of one request."""
        return self._client.new_number()

    def places_for(self, texts: int, caller: Caller = ANYONE) -> int:
        """The places that a request needs for so many texts: only some of many are in the engine at once."""
        most = min(POOLING_WINDOW * self.facts.ready.worker.max_num_seqs, self.admissions.most_for(caller))
        return max(1, min(texts, most))

    async def pool(
        self,
        items: Sequence[PooledText],
        admission: Admission,
        *,
        replica: int | None = None,
        media_items: Mapping[bytes, MediaItem] = MappingProxyType({}),
        tell: Callable[[], None] = lambda: None,
        **options: Unpack[AddOptions],
    ) -> list[Pooled]:
        """Returns the result of each item, in order. The first failure ends the others and is raised.

        `admission` has `places_for` the items: so many are in the engine at once. The time for which the
        others wait here counts as queued. `media_items` has their media by their hashes.
        """
        self.require_ready()
        admission.check()
        if self.config.log.enable_log_requests:
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
                    streams = self._client.submit_many(batch, replica=replica, **told)
                    waiting.extend(zip(streams, repeat(time.monotonic() if sent else began)))
                    admission.streams.update([stream.id for stream in streams])
                stream, since = waiting[0]
                answer = await anext(stream)
                if isinstance(answer, Failed):
                    self.metrics.finished("error")
                    admission.check()
                    raise from_engine(answer, self.admissions.seconds_to_wait())
                admission.begun, took = True, time.monotonic() - since
                self.metrics.pooled(items[len(answers)].length, answer.cached, took, answer.timing)
                answers.append(sent_later(answer, since - began) if since > began else answer)
                waiting.popleft()
                admission.streams.discard(stream.id)
                tell()
        finally:
            self._client.abort(left := [stream.id for stream, _ in waiting])
            admission.streams.difference_update(left)
        return answers

    async def abort(self, request_ids: Iterable[str], caller: Caller | None = None) -> int:
        """Ends these requests, or those of them that `caller` has sent, whose streams finish with "abort".
        Returns how many were found."""
        found = [one for id in request_ids for one in self.admissions.by_id.get(id, ()) if one.streams]
        found = [one for one in found if caller is None or one.owner.name == caller.owner]
        self._client.abort([stream for one in found for stream in one.streams])
        return len({one.id for one in found})

    def set_paused(self, admission: Admission, paused: bool) -> None:
        """Has nothing more computed for a request while its answer is not read, or has it go on."""
        (self._client.pause if paused else self._client.resume)(admission.streams)

    def begin_drain(self, *, refuse: bool) -> None:
        """Notes that the server will end. Until it shall `refuse` new requests, it takes them as before."""
        self._draining = Status("draining", "draining", fraction=0.0, refuses=refuse)

    async def _generate_all(self, asked: CheckedPrompt) -> AsyncGenerator[Delta, None]:
        own = asked.admission or asked.admit(self.admissions)
        asked.admission, given = own, asked.admission
        streams: list[Stream[Tokens]] = []
        try:
            own.check()
            prompt = unpack(asked.prompt)
            sent = [(prompt, params) for params in asked.params]
            streams += self._client.submit_all(sent, replica=asked.replica, **asked.options)
            own.streams.update(stream.id for stream in streams)
            choices = [self._generate(asked, index, stream) for index, stream in enumerate(streams)]
            async with aclosing(merged(choices)) as deltas:
                async for _, delta in deltas:
                    yield delta
        finally:
            self._client.abort([stream.id for stream in streams])
            own.streams.difference_update(stream.id for stream in streams)
            if given is None:
                own.release()

    async def _generate(
        self, asked: CheckedPrompt, index: int, stream: Stream[Tokens] | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of one choice, which is sent first unless it has a stream already."""
        admission = asked.admission or asked.admit(self.admissions)
        admission.check()
        if stream is None:
            given = unpack(asked.prompt), asked.params[index]
            stream = self._client.submit(*given, replica=asked.replica, **asked.options)
        choice = Choice(asked, index, admission, self.metrics, self.tokenizer, self.facts.eos_token_ids)
        admission.streams.add(stream.id)
        try:
            async for new in stream:
                if isinstance(new, Failed):
                    choice.fail()
                    raise from_engine(new, self.admissions.seconds_to_wait())
                delta = choice.push(new)
                if choice.finished:
                    self._client.abort([stream.id])  # a stop string ended it, which the engine does not know
                if delta is not None:
                    yield delta
                if choice.finished:
                    return
        finally:
            self._client.abort([stream.id])
            admission.streams.discard(stream.id)
            choice.close()
            admission.shrink(admission.count - 1)

    async def _search(self, asked: CheckedPrompt, rules: BeamRules) -> AsyncGenerator[Delta, None]:
        """Yields the answers that a beam search finds."""
        own = asked.admission or asked.admit(self.admissions)
        given = own, self.metrics, self.tokenizer, self.facts.eos_token_ids
        choices = [Choice(asked, index, *given) for index in range(len(asked.params))]
        found = BeamRequests(self._client, asked, rules, own, self.admissions.seconds_to_wait).deltas(choices)
        async with aclosing(found) as deltas:
            async for delta in deltas:
                yield delta

    def _raise_if_dead(self) -> None:
        if self._client.dead is not None:
            raise NoEngine(self._client.dead, "engine_given_up")
