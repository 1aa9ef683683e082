"""The one owner of an engine's adapters: which are known, which are being loaded, which the workers have.

An adapter is known while a name refers to it, or a request needs it. The workers have room for so many at a
time: if another one is wanted, the one goes that was used longest ago, but none that is in use.
One that was just used stays a while in which others run, so that the load pays: with one adapter more than
places, each in turn, every request would need one. Requests whose adapter is not there wait here, outside
of the scheduler, so they hold nobody up; the adapter is loaded first that a request of the best rank waits
for. If all places are in use, requests of the same rank for those that are there may pass so many times, and
those of a worse one not at all; then one of these takes no more sequences until it is free and another one
has its place.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from engine_core.adapters.adapter_files import change_of
from engine_core.adapters.messages import Adapter, AdapterState, adapted_facts
from engine_core.engine_stats import LOAD_SECONDS, AdapterStats, PlainHistogram
from engine_core.features.adapters.adapter_names import AdapterNames
from engine_core.features.adapters.known_adapters import (
    AdapterLoad,
    KnownAdapter,
    RequestForAdapter,
    idlest,
    stats_of,
)
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import AddRequest, Failed
from worker.calls.messages import (
    DROP_ADAPTER,
    ENTER_ADAPTER,
    READ_ADAPTER,
    AdapterFacts,
    CallFailed,
    results_of,
)
from worker.worker_facts import WorkerFacts

if TYPE_CHECKING:
    from engine_core.executor import CallFuture

PATIENCE = 16
"""The requests that may pass one whose adapter finds no place, if its rank is not better than theirs."""

WORTH, MOST_SECONDS = 8, 0.5
"""How many times as long as a load a wanted adapter may wait for the place of one that was just used, and how
many seconds at most."""

Key = tuple[int, int]
"""The number of a client, and the id of one of its requests."""

_log = logging.getLogger(__name__)


class AdapterTable:
    def __init__(self, most: int, call: Callable[[str, list[Any]], CallFuture]) -> None:
        """The workers have room for `most` adapters at a time; `call` has every worker run a method."""
        self._most, self._call = most, call
        self._names = AdapterNames()
        self._known: dict[str, KnownAdapter] = {}
        """Digest -> the adapter."""
        self._free = list(range(1, most + 1))
        """The numbers that no adapter has, the lowest first."""
        self._wanted: dict[KnownAdapter, None] = {}
        """The adapters that are to be loaded, in the order in which they were asked for."""
        self.loading: AdapterLoad | None = None
        self._drops: deque[tuple[CallFuture, int]] = deque()
        """Numbers whose adapters workers give up, and what comes of it. Only then they are free: the next one
        is read beside steps, and might be read before."""
        self._queued: dict[Key, RequestForAdapter] = {}
        self._asleep, self._loads = False, PlainHistogram(LOAD_SECONDS)
        self._uses = self._passed = self._running = 0
        self._patience = 0.0
        """Seconds for which a wanted adapter waits for the place of one that was just used."""
        self._states: list[AdapterState] = []
        self._failed: list[tuple[int, Failed]] = []

    # Orders of servers.

    def load(self, adapter: Adapter, told: AdapterFacts | None = None) -> None:
        """Have a name refer to an adapter, of which other workers have `told`, if any. One that it refers to
        already answers until the new one is loaded.

        `take_states` tells what becomes of it.
        """
        if not self._names.order(adapter):
            return None if told else self._states.append(AdapterState(adapter))
        self._overtake(adapter.name, adapter.ordered, adapter.digest)
        known = self._known.setdefault(adapter.digest, KnownAdapter(adapter, told=told))
        known.ask_for(adapter)
        if known.facts is not None:
            self._tell(known)
        elif not known.number:
            self._want(known)

    def drop(self, name: str, ordered: int) -> None:
        """Have a name refer to nothing. Requests that use the adapter already run on."""
        if (adapter := self._names.drop(name, ordered)) is not None:
            self._states.append(AdapterState(adapter))
            self._forget_unused(self._known[adapter.digest])
        self._overtake(name, ordered)

    def _overtake(self, name: str, ordered: int, digest: str = "") -> None:
        """Answer earlier orders to load other adapters under a name than that of `digest`."""
        for known in [one for one in self._known.values() if one.adapter.digest != digest]:
            if (adapter := known.withdraw(name, ordered)) is not None:
                is_there = self._names.adapters.get(name) == adapter
                self._states.append(AdapterState(adapter, known.told if is_there else None))
                self._forget_unused(known)

    def fall_asleep(self) -> None:
        """Note that there are no workers until `wake`. Call this when nothing is loaded."""
        self._asleep = True
        self._drops.clear()
        self._free = list(range(1, self._most + 1))
        for known in self._known.values():
            if known.number:
                self._give_up(known)

    def wake(self) -> None:
        """Note that there are workers again, which have no adapter yet."""
        self._asleep = False

    # Requests.

    def renewed(self, request: AddRequest) -> AddRequest:
        """The request, for the adapter that has replaced its own one since it was sent, if one has."""
        is_kept = request.adapter in self._known or request.prompt_len
        return request if is_kept else replace(request, adapter=self._names.successor(request.adapter))

    def refusal(self, request: AddRequest) -> Failed | None:
        """Why a request cannot run, if its adapter is not known."""
        if request.adapter in self._known:
            return None
        return Failed(request.id, 503, "its adapter has been unloaded meanwhile: send the request again")

    def facts_of(self, request: AddRequest, base: WorkerFacts) -> WorkerFacts:
        """The facts of the model by which a request is checked: its adapter may do tasks of its own."""
        known = self._known.get(request.adapter)
        return base if known is None or known.told is None else adapted_facts(base, known.told)

    def enter(
        self, client: int, request: AddRequest, matcher: TokenMatcher | None, rank: int = 0
    ) -> bool | Failed:
        """Whether a request can run now. If not, it stays here, and `leave` returns it when it can."""
        known, key = self._known[request.adapter], (client, request.id)
        if key in self._queued:
            return Failed(request.id, 400, "a live request has the same id")
        if known.takes_requests:
            known.rank = rank
            self._passed += bool(self._wanted)
            if self._passed >= PATIENCE or (self._wanted and self._first_wanted().rank < rank):
                self._close_one()
            return True
        known.rank = min(known.rank, rank) if known.waiting else rank
        self._queued[key] = RequestForAdapter(client, request, matcher, known)
        known.waiting += 1
        if not known.number:
            self._want(known)
        return False

    def leave(self) -> list[RequestForAdapter]:
        """The requests whose adapter is there now, which are not here any more."""
        able = [key for key, queued in self._queued.items() if queued.known.takes_requests]
        return [self._take_out(key) for key in able]

    def take_failed(self) -> list[tuple[int, Failed]]:
        """The answers to requests whose adapter cannot be loaded, with their clients."""
        failed, self._failed = self._failed, []
        return failed

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """Let requests go that nobody waits for any more; returns those that were here."""
        found = [key for key in keys if key in self._queued]
        for key in found:
            self._forget_unused(self._take_out(key).known)
        return found

    def keys(self) -> list[Key]:
        """The requests that wait here."""
        return list(self._queued)

    def set_paused(self, keys: Iterable[Key], *, paused: bool) -> None:
        for key in keys:
            if key in self._queued:
                self._queued[key].paused = paused

    def begin(self, digest: str) -> int:
        """Note that a sequence uses an adapter, until `end`; returns the number that workers know."""
        known = self._known[digest]
        self._uses, self._running = self._uses + 1, self._running + 1
        known.users, known.used = known.users + 1, self._uses
        return known.number

    def end(self, digest: str) -> None:
        known = self._known[digest]
        known.users, known.left = known.users - 1, time.monotonic()
        self._running -= 1
        self._forget_unused(known)

    def first_position(self, digest: str, prompt: list[int]) -> int | None:
        """The first position that an adapter computes of a prompt; None if it computes none."""
        return self._known[digest].first_position(prompt)

    # What is told.

    @property
    def has_news(self) -> bool:
        """Whether `advance` would find something, or something is to be told."""
        if self.loading is not None:
            found = self.loading.call.done()
        elif self._wanted and not self._asleep and not self._free:
            due = self.next_look
            found = self._drops[0][0].done() if self._drops else due is not None and due <= time.monotonic()
        else:
            found = bool(self._wanted) and not self._asleep
        return bool(found or self._states or self._failed)

    @property
    def next_look(self) -> float | None:
        """The time at which a wanted adapter gets a place though nothing has happened."""
        if not self._wanted or self._free or self.loading or self._drops or self._asleep:
            return None
        return None if (victim := idlest(self._known.values())) is None else self._due(victim)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits here, or an adapter is being loaded or is to be."""
        wanted = self._wanted and not self._asleep
        return bool(self.loading or self._states or self._failed or self._queued or wanted)

    @property
    def stats(self) -> AdapterStats:
        return stats_of(self._known.values(), self._loads)

    def take_states(self) -> list[AdapterState]:
        """What servers are to be told."""
        states, self._states = self._states, []
        return states

    @property
    def all_states(self) -> list[AdapterState]:
        """What a server is to be told that is new."""
        found = [(adapter, self._known[adapter.digest]) for adapter in self._names.adapters.values()]
        return [AdapterState(adapter, known.told) for adapter, known in found if known.told is not None]

    # Loading.

    def advance(self) -> None:
        """Take note of what workers have loaded, and have them load what is wanted next."""
        while self._drops and self._drops[0][0].done():
            call, number = self._drops.popleft()
            heappush(self._free, number)
            for each in call.result():
                if each.error:
                    _log.error("an adapter could not be dropped: %s", each.error)
        while self.loading is not None:
            if not self.loading.call.done():
                return
            load, self.loading = self.loading, None
            self._land(load)
        while self._wanted and self.loading is None and not self._asleep:
            if self._free:
                self._begin_load(self._first_wanted(), heappop(self._free))
            elif self._drops:
                return
            elif (victim := idlest(self._known.values())) is not None:
                if self._due(victim) > time.monotonic():
                    return
                number = victim.number
                self._give_up(victim)  # it goes when the other one is entered in its place
                self._begin_load(self._first_wanted(), number)
            else:
                return
        if not self._wanted:
            self._passed = 0
            for known in self._known.values():
                known.is_closing = False

    def wait(self) -> None:
        """Wait until workers have done what they were last told to do for an adapter."""
        if self.loading is not None:
            self.loading.call.result()
        elif self._wanted and self._drops:
            self._drops[0][0].result()

    def _due(self, victim: KnownAdapter) -> float:
        """The time from which an adapter gives its place to the one that is wanted first."""
        wanted = self._first_wanted()
        if victim.is_closing or wanted.untold or not self._running or wanted.rank < victim.rank:
            return 0.0
        return min(victim.left, wanted.wanted) + self._patience

    def _first_wanted(self) -> KnownAdapter:
        """The adapter that is to be loaded next: those come first that servers have ordered."""
        return min(self._wanted, key=lambda one: (not one.untold, one.rank))

    def _want(self, known: KnownAdapter) -> None:
        if known not in self._wanted:
            self._wanted[known], known.wanted = None, time.monotonic()

    def _close_one(self) -> None:
        """Have one of the worst rank, or with the fewest sequences, take no more: its place is wanted."""
        loaded = [one for one in self._known.values() if one.facts is not None]
        if loaded and not any(one.is_closing for one in loaded):
            self._passed = 0
            min(loaded, key=lambda one: (-one.rank, one.users, one.used)).is_closing = True

    def _begin_load(self, known: KnownAdapter, number: int) -> None:
        del self._wanted[known]
        known.number, self._passed = number, 0
        if changed := change_of(known.adapter):
            self._evict(known)
            return self._fail(known, changed)
        call = self._call(READ_ADAPTER, [known.number, known.adapter.folder])
        self.loading = AdapterLoad(known, call, time.monotonic())

    def _land(self, load: AdapterLoad) -> None:
        """Take note of an adapter that is read or loaded, or cannot be."""
        known = load.known
        try:
            returned = results_of(load.call.result())
            if load.facts is None:
                facts = [msgspec.convert(each, AdapterFacts, from_attributes=True) for each in returned]
                load.facts = replace(facts[-1], bytes=sum(each.bytes for each in facts))
                load.call = self._call(ENTER_ADAPTER, [known.number])
                self.loading = load
                return
        except (CallFailed, msgspec.ValidationError) as error:
            self._evict(known)
            return self._fail(known, str(error))
        known.facts = known.told = load.facts
        known.left = time.monotonic()
        seconds = known.left - load.since
        self._patience = min(WORTH * seconds, MOST_SECONDS)
        self._uses += 1
        known.used = self._uses
        _log.info("adapter %s: %d bytes, loaded in %.2f s", known.adapter.name, known.facts.bytes, seconds)
        self._loads.observe(seconds)
        self._tell(known, seconds)
        self._forget_unused(known)

    def _tell(self, known: KnownAdapter, seconds: float = 0.0) -> None:
        untold, known.untold = known.untold, []
        self._states += [AdapterState(each, known.facts, seconds=seconds) for each in untold]
        for each in untold:
            if (before := self._names.replace(each)) and not self._names.has(before):
                for queued in self._queued.values():
                    if queued.request.adapter == before and not queued.request.prompt_len:
                        queued.wait_for(known)
                self._forget_unused(self._known[before])

    def _fail(self, known: KnownAdapter, reason: str) -> None:
        """Forget an adapter that cannot be loaded, and tell servers and those who wait for it."""
        self._wanted.pop(known, None)
        named = self._names.drop_all(known.adapter.digest)
        failed, known.untold = {each.name: each for each in (*named, *known.untold)}, []
        self._states += [AdapterState(each, error=reason) for each in failed.values()]
        for key in [key for key, queued in self._queued.items() if queued.known is known]:
            queued = self._take_out(key)
            message = f"the adapter {known.adapter.name} cannot be loaded: {reason}"
            self._failed.append((queued.client, Failed(queued.request.id, 503, message)))
        self._forget_unused(known)

    def _take_out(self, key: Key) -> RequestForAdapter:
        queued = self._queued.pop(key)
        queued.known.waiting -= 1
        return queued

    def _forget_unused(self, known: KnownAdapter) -> None:
        """Let an adapter go that nobody can ask for any more, once nothing uses it."""
        is_loading = self.loading is not None and self.loading.known is known
        if known.users or known.waiting or known.untold or is_loading:
            return
        if known.number == 0 and known.told is not None:
            self._wanted.pop(known, None)  # those who wanted it again have gone
        if not self._names.has(known.adapter.digest):
            self._wanted.pop(known, None)
            if known.number:
                self._evict(known)
            self._known.pop(known.adapter.digest, None)

    def _evict(self, known: KnownAdapter) -> None:
        self._drops.append((self._call(DROP_ADAPTER, [known.number]), known.number))
        self._give_up(known)

    def _give_up(self, known: KnownAdapter) -> None:
        """Note that no sequence can have an adapter any more, whose number is for another one."""
        known.number, known.facts, known.is_closing = 0, None, False
        if known.waiting or known.untold:
            self._want(known)
