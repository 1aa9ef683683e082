"""What is served of one model, and the way to its engines, which is `ask`. It knows no HTTP.

It is started once, tells how far it is, and has what asks need: facts, tokenizer, readers, admissions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from msgspec.structs import replace

from engine_core.client.client import EngineClient
from server.access.admission import Admission, Admissions
from server.access.client_identity import Caller
from server.access.keyring import Access
from server.errors import ASLEEP, READY, NoEngine, NotFound, Status, Unavailable, loading
from server.frontend.asks import Ask
from server.frontend.engine_requests import EngineRequests
from server.frontend.media_readers import open_inputs
from server.grammar_checks.grammar_checker import ModelGrammars
from server.helpers.job_queue import Helpers
from server.metrics.server_metrics import Metrics
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.reading.reading_context import ReadingContext, ReadingOptions
from server.request_limits import Limits
from server.requests.checkpoint_facts import find_facts, find_folder, load_tokenizer, tokenizer_files
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from server.frontend.transcriber import Transcriber
    from server.media.media_reader import MediaReader
    from server.reading.long_bodies import LongBodies

_log = logging.getLogger(__name__)

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
        self.config, self.metrics, self.client = config, metrics, client
        self.folder = Path()
        """The checkpoint's folder on this machine, once it is known."""
        self._has_facts = False
        self.limits: Limits | None = None
        """What a request may ask, if another than the operator says: of programs, whatever they like."""
        self._source: TokenizerFiles | None = None
        self._reading = ReadingOptions.of(config)
        self.helpers = Helpers(config.log.style)
        """All helper processes of this frontend."""
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
        self.orders, self.call_workers = client.orders, client.call_workers
        metrics.watch(lambda: client.replicas, config.engine.worker.lora.most_in_step)

    async def start(self, *, reads_bodies: bool = True) -> None:
        """Waits for an engine, and loads the tokenizer meanwhile. Raises Unavailable if all are dead.

        `reads_bodies`: whether requests come as bodies, which may be long.
        """
        if self.config.replicas.here:
            await self.client.folder_known.wait()
            self._raise_if_dead()
            self.folder = Path(self.client.folder)
        if not self.config.replicas.here or not self.folder.is_dir():  # in a cache that was cleared since
            self.folder = await asyncio.to_thread(find_folder, self.config)
        self._source = await asyncio.to_thread(tokenizer_files, self.config, self.folder)
        if reads_bodies and self.config.engine.worker.kv_cache_dir is not None:  # which is for long prompts
            self.long_bodies.start()
        self.tokenizer = await load_tokenizer(self._source, self.config)
        await self.client.ready_or_dead.wait()
        self._raise_if_dead()
        self._update_facts()
        self.client.on_change = self._update_facts

    def _update_facts(self) -> None:
        """Reads the facts again: which replicas work decides them. While none does, the last ones stay."""
        if self.client.ready is not None:
            found = find_facts(self.config, self.client.ready, self.folder, self.tokenizer)
            if self.limits is not None:
                found = replace(found, limits=self.limits)
            self.facts = open_inputs(self, found, self.tokenizer, self.client)
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

    @cached_property
    def long_bodies(self) -> LongBodies:
        """Reads the bodies of requests that are too long for the event loop."""
        from server.reading.long_bodies import LongBodies  # with all bodies, which programs do without

        return LongBodies(self.helpers, self._tokenizer_files, self._reading)

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
        if self.client.dead is not None:
            return Status("dead", "engine_given_up", fraction=0.0, refuses=True)
        if self._draining is not None:
            return self._draining
        if self.orders.asleep:
            return ASLEEP
        if self._has_facts and (reason := self.client.restarting) is not None:
            state = "stalled" if reason == "engine_stalled" else "restarting"
            return Status(state, reason, fraction=0.0, since=self._restarting_since)
        if self.client.ready is not None:
            if self.adapters is not None and not self.adapters.has_started:
                return loading("adapters", 0.0)
            return READY if self._has_facts else loading("tokenizer", 0.0)
        return loading(self.client.progress.phase, self.client.progress.fraction)

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

    @property
    def engine_requests(self) -> EngineRequests:
        """What an ask sends its prompts and texts by."""
        return EngineRequests(self)

    def new_group(self) -> int:
        """A number for the option `group` of all prompts, or all texts, of one request."""
        return self.client.new_number()

    async def abort(self, request_ids: Iterable[str], caller: Caller | None = None) -> int:
        """Ends these requests, or those of them that `caller` has sent, whose streams finish with "abort".
        Returns how many were found."""
        found = [one for id in request_ids for one in self.admissions.by_id.get(id, ()) if one.streams]
        found = [one for one in found if caller is None or one.owner.name == caller.owner]
        self.client.abort([stream for one in found for stream in one.streams])
        return len({one.id for one in found})

    def set_paused(self, admission: Admission, paused: bool) -> None:
        """Has nothing more computed for a request while its answer is not read, or has it go on."""
        (self.client.pause if paused else self.client.resume)(admission.streams)

    def forget_media(self) -> None:
        """Drop the prepared media that this process keeps for later requests."""
        if self.media is not None:
            self.media.kept.clear()

    def begin_drain(self, *, refuse: bool) -> None:
        """Notes that the server will end. Until it shall `refuse` new requests, it takes them as before."""
        self._draining = Status("draining", "draining", fraction=0.0, refuses=refuse)

    def _raise_if_dead(self) -> None:
        if self.client.dead is not None:
            raise NoEngine(self.client.dead, "engine_given_up")
