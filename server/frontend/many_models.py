"""A server of several models, as its routes and its process see it: their names, states and requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from msgspec.structs import replace

from engine_core.client.client import EngineClient
from engine_core.client.replica import Replica, all_stats
from engine_core.config import Address
from engine_core.engine_stats import Stats
from engine_core.reason_codes import Reason
from models.plain_files import ConfigError
from server.access.client_identity import Caller
from server.access.keyring import Access
from server.errors import READY, BadRequest, NoEngine, NotFound, Status, Unavailable, loading
from server.frontend.frontend import Frontend
from server.frontend.model_engines import ModelEngines, ModelState
from server.frontend.model_memory import ModelMemory, budget_for
from server.frontend.model_set import ModelSet, Slot
from server.helpers.job_queue import begin_task
from server.metrics.server_metrics import Metrics
from server.model_facts import ANY_MODEL, TAG
from server.options.model_list import ModelEntry
from server.options.server_flags import ServerConfig

LOOK_SECONDS = 10.0
"""Seconds between looks whether models have grown beyond the budget."""

_log = logging.getLogger(__name__)


class MediaLimit(NamedTuple):
    most_bytes: int
    """The most bytes of all media of a request."""


class Named(NamedTuple):
    """The model, or the adapter, that a name means."""

    state: ModelState
    adapter: str = ""
    """The adapter of that model that is meant, if one is."""


class ManyModels:
    """The models of one server. Requests are given to the frontend of one of them."""

    def __init__(
        self,
        config: ServerConfig,
        entries: Sequence[ModelEntry],
        memory: ModelMemory,
        report: Callable[..., None],
    ) -> None:
        """`config` has the options of the whole server; `report` is that of `ModelEngines`."""
        self.config = config
        self.metrics = Metrics(entries[0].name)
        self.access = Access(config.access, self.metrics.key_counters)
        self._engines = ModelEngines(memory, self.access, report)
        self._set, self._memory = ModelSet[Frontend](self._engines, memory.budget), memory
        self._names: dict[str, ModelState] = {}
        """The models by their names and aliases; the first is meant where no name is given."""
        self.idle = asyncio.Event()
        """Set while no request runs."""
        self.idle.set()
        self.died = asyncio.Event()
        """Set when nothing can be served any more."""
        self.dead: str | None = None
        """The reason why."""
        self.broke = self.explained = False
        self._requests = 0
        self._started = False
        self._draining: Status | None = None
        self._work = set[asyncio.Task[Any]]()
        self.use(entries)

    # Names.

    @property
    def states(self) -> list[ModelState]:
        """The models that are served, in their order."""
        return list(dict.fromkeys(self._names.values()))

    @property
    def loaded(self) -> list[Frontend]:
        return [state.slot.served for state in self.states if state.slot.served is not None]

    def names_of(self, state: ModelState) -> list[str]:
        return [name for name, one in self._names.items() if one is state]

    def named(self, caller: Caller | None = None) -> list[tuple[str, ModelState]]:
        """The names, and the models that they mean, that a client may use."""
        allowed = [one for one in self.states if caller is None or caller.for_model(self.names_of(one))]
        return [(name, state) for state in allowed for name in self.names_of(state)]

    def find(self, name: str | None, caller: Caller | None = None) -> ModelState:
        """The model of a name, which an adapter of it may have. Raises NotFound."""
        return self.find_named(name, caller).state

    def find_named(self, name: str | None, caller: Caller | None = None) -> Named:
        """The model and the adapter of a name, or the first model if none is given, among those that a client
        may use. Raises NotFound, which says what there is."""
        names = dict(self.named(caller))
        if (not name or name in ANY_MODEL) and names:
            return Named(next(iter(names.values())))
        name = name or ""
        found = names.get(name) or names.get(name.removesuffix(TAG))
        if found is None:
            found = next((one for one in names.values() if one.entry.config.engine.model == name), None)
        if found is not None:
            return Named(found)
        states = list(dict.fromkeys(names.values()))
        adapters = {own: state for state in states for own in state.adapters}
        if (own := next((each for each in (name, name.removesuffix(TAG)) if each in adapters), "")) != "":
            return Named(adapters[own], own)
        base, _, own = name.rpartition(":")
        state = names.get(base) if own else None
        if state is not None and (state.entry.takes_adapters or state.holds_adapters):
            return Named(state, own)
        known = ", ".join((*names, *adapters)) or "none that your key is for"
        raise NotFound(f"The model `{name[:200]}` does not exist. This server has: {known}", "model")

    def use(self, entries: Sequence[ModelEntry]) -> None:
        """Serve these models from now on. Requests of others are answered to their end."""
        states = [self._engines.states.get(entry.id) or self._add(entry) for entry in entries]
        for state, entry in zip(states, entries, strict=True):
            state.entry = entry
            self._set.add(state.slot)
        before = self.states
        names = {entry.name: state for entry, state in zip(entries, states, strict=True)}
        aliases = {name: one for one, entry in zip(states, entries, strict=True) for name in entry.aliases}
        self._names = names | aliases
        for state in before:
            if state not in states:
                self._set.remove(state.slot)
        self._peeked = begin_task(self._peek(states), self._work)

    def move(self, alias: str, state: ModelState) -> None:
        """Have a name mean another model from now on. Requests that it has brought go on where they are."""
        if any(alias in (one.entry.name, *one.adapters) for one in self.states):
            raise BadRequest(f"`{alias}` is the name of a model or of an adapter, and no alias.", "alias")
        self._names[alias] = state

    def _add(self, entry: ModelEntry) -> ModelState:
        metrics = Metrics(entry.name) if self._engines.states else self.metrics
        if metrics is not self.metrics:
            self.metrics.show_beside(metrics)
        state = ModelState(entry, metrics, Slot(entry.name))
        self._engines.states[entry.id] = state
        return state

    # Requests.

    @asynccontextmanager
    async def using(
        self, state: ModelState, *, retry: bool = False, background: bool = False
    ) -> AsyncIterator[Frontend]:
        """The frontend of a model, which stays loaded meanwhile. Raises ApiError if it cannot be loaded."""
        self.require_ready()
        self._count(1)
        try:
            frontend = await self._set.enter(state.slot, retry=retry, background=background)
            try:
                yield frontend
            finally:
                self._set.leave(state.slot)
        finally:
            self._count(-1)

    def require_ready(self) -> None:
        """Raises Unavailable if no requests are taken."""
        self.status.raise_if_refused()

    def _count(self, change: int) -> None:
        self._requests += change
        (self.idle.clear if self._requests else self.idle.set)()

    @property
    def live(self) -> int:
        """The number of requests, those that wait for a load among them."""
        return self._requests

    async def abort(self, request_ids: Iterable[str], caller: Caller | None = None) -> int:
        """Ends these requests, whichever model has them; returns how many were found."""
        ids = list(request_ids)
        return sum([await frontend.abort(ids, caller) for frontend in self.loaded])

    async def unload(self, state: ModelState) -> bool:
        """Have a model give its memory back; returns False if requests are using it."""
        return await self._set.unload(state.slot)

    @property
    def media(self) -> MediaLimit:
        """What may come beside texts, for whichever model."""
        return MediaLimit(max(state.entry.config.media.max_media_mb for state in self.states) << 20)

    # The life of the server.

    async def start(self) -> None:
        """Take requests, at which models are loaded. Raises ConfigError if no model will ever have room."""
        await self._peeked
        await self._check_memory()
        self._started = True
        begin_task(self._look(), self._work)

    @property
    def status(self) -> Status:
        if self.dead is not None:
            return Status("dead", "engine_given_up", fraction=0.0, refuses=True)
        if self._draining is not None:
            return self._draining
        if self._started:
            return READY
        client = next(iter(self._clients), None)
        shown = (
            loading("start", 0.0)
            if client is None
            else loading(client.progress.phase, client.progress.fraction)
        )
        return replace(shown, refuses=False)  # requests wait

    @property
    def replicas(self) -> list[Replica]:
        return [one for client in self._clients for one in client.replicas]

    @property
    def stats(self) -> Stats | None:
        return all_stats(self.replicas)

    @property
    def _clients(self) -> list[EngineClient]:
        return [state.client for state in self._engines.states.values() if state.client is not None]

    def begin_drain(self, *, refuse: bool) -> None:
        """Note that the server will end. Until it shall `refuse` new requests, it takes them as before."""
        self._draining = Status("draining", "draining", fraction=0.0, refuses=refuse)

    def fail(self, reason: str, code: Reason = "engine_given_up") -> None:
        """End all requests, as nothing can be served any more."""
        self.dead = reason if self.dead is None else self.dead
        self._set.refuse()
        for client in self._clients:
            client.fail(reason, code)
        self.died.set()

    def close(self) -> None:
        for task in self._work:
            task.cancel()
        begin_task(self._set.close(), self._work)
        for client in self._clients:
            client.close()

    # What becomes of engines.

    def engines_started(self, model: int, address: Address, pids: Sequence[int]) -> None:
        if (state := self._engines.states.get(model)) is not None:
            self._engines.started(state, address, pids)
            if state.slot.state == "unloaded":  # by the server in whose place this one is
                begin_task(self._touch(state), self._work)

    def client_of(self, model: int) -> EngineClient | None:
        """The client of a model's engines, if they are there."""
        state = self._engines.states.get(model)
        return None if state is None else state.client

    def engines_ended(self, model: int, reason: str) -> None:
        if (state := self._engines.states.get(model)) is None:
            return
        self._engines.ended(state)
        if (served := state.slot.served) is not None:
            _log.error("the engine of %s has ended: %s", state.slot.name, reason or "it was asked to")
            self._engines.close_client(state)
            served.helpers.close()
            self._set.lose(state.slot, NoEngine(reason, "engine_given_up", retry_after=10))
            if self.config.exit_on_failure:
                self.fail(f"the engine of {state.slot.name} has ended: {reason}")

    async def _check_memory(self) -> None:
        """Raises ConfigError if no model will ever have room, as far as their files tell that are here."""
        sizes = {state: size for state in self.states if (size := state.estimate) is not None}
        if len(sizes) < len(self.states):
            return
        smallest, budget = min(sizes, key=lambda state: sizes[state]), self._memory.budget
        beside = await self._engines.taken_beside(())
        if (needed := sizes[smallest] + beside) > budget:
            raise ConfigError(
                f"--memory is {budget >> 20} MiB, which is too little for any model: "
                f"{smallest.entry.name}, the smallest, needs {sizes[smallest] >> 20} MiB, and the server "
                f"itself {beside >> 20} MiB. Give --memory {(budget_for(needed, budget) >> 20) + 1}M or more"
            )

    async def _touch(self, state: ModelState) -> None:
        """Load a model of which nobody asks anything."""
        try:
            async with self.using(state):
                pass
        except Unavailable:
            pass  # it is in the log

    async def _peek(self, states: Sequence[ModelState]) -> None:
        for state in states:
            await asyncio.to_thread(self._engines.peek, state)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._set.shrink()
