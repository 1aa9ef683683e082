"""Lets requests in: one decision for a whole request, before it costs anything.

A server has as many places as sequences that run, and as may wait (`--max-num-queued-reqs`). While it is not
full, whoever comes gets in. When it is, places belong to owners by their weights: who has more than that is
refused with 429, and to one who has less the newest waiting request of those who have more makes room. Who is
alone with a full server is refused with 503.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, Protocol

from engine_core.protocol import Standing, Stats
from server.access.backlog import Backlog, Work, seconds_of
from server.access.client_identity import Caller
from server.access.requests_by_id import RequestsById
from server.errors import ApiError, BadRequest, Overloaded, TooManyRequests

DEFAULT_QUEUE = 8192
"""Waiting sequences when --max-num-queued-reqs is not given: more than any client would wait for."""
DEFAULT_QUEUED_TOKENS = 1 << 22
"""Waiting tokens when --max-num-queued-tokens is not given: two times some 200 MB, here and in the engine."""

FIRST_GUESS = 5
"""Seconds to wait, while no engine has said how fast it is."""
MAX_WAIT = 3600

_FULL = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different "
    "instance."
)
_MUCH_TO_READ = (
    "The engine has reached its prefill token backlog limit. Please try again later or on a different "
    "instance."
)
_SHED = (
    "The server is full, and this was the newest of your requests beyond your share of it. Try again later."
)


class Engines(Protocol):
    """What admission asks the engines."""

    @property
    def stats(self) -> Stats | None: ...

    def abort(self, ids: Iterable[int], /) -> None: ...

    async def standing(self, id: int, /) -> Standing | None: ...


class Owner:
    """The requests of one owner that are in the server."""

    __slots__ = ("admissions", "backlog", "live", "name", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.live = 0
        """The places that it has."""
        self.admissions: dict[Admission, None] = {}
        """Its requests, the oldest first."""
        self.backlog = Backlog()


class Admission:
    """A request that was let in, until `release`. It has a place for each of its sequences."""

    __slots__ = ("_house", "begun", "caller", "count", "id", "owner", "refusal", "since", "streams")

    def __init__(self, house: Admissions, caller: Caller, owner: Owner, count: int) -> None:
        self._house = house
        self.caller = caller
        self.owner = owner
        self.count = count
        """The places that it still has."""
        self.since = 0.0
        """The moment of its arrival on the monotonic clock, if it came by HTTP."""
        self.begun = False
        """Whether an answer has come: from then on nobody else gets its places."""
        self.id = ""
        """The name by which it can be ended, if it has one."""
        self.streams: set[int] = set()
        """Numbers of its streams from the engine."""
        self.refusal: ApiError | None = None
        """The error that ends it, because others need its places."""

    def check(self) -> None:
        """Raises the error that ends the request, if others got its places."""
        if self.refusal is not None:
            raise self.refusal

    async def standing(self) -> Standing | None:
        """How far the first of its sequences has come that an engine has; None if no engine says so."""
        return await self._house.engines.standing(min(self.streams)) if self.streams else None

    def check_tokens(self, tokens: int) -> None:
        """Refuses the request if its prompts, which have so many tokens in all, would be too much to wait."""
        house = self._house
        if house.waiting_tokens and house.waiting_tokens + tokens > house.max_tokens:
            house.refuse(Overloaded(_MUCH_TO_READ, retry_after=house.seconds_to_wait()))

    def read(self, tokens: int) -> None:
        """Count the tokens of the prompts against the quotas of the caller's key."""
        if self.caller.account is not None:
            self.caller.account.read(tokens)

    def add(self, work: Work) -> None:
        """Count work that is sent to the engine."""
        self._house.waiting_tokens += work.prompt
        self.owner.backlog.add(work)

    def begin(self, work: Work) -> None:
        """Count work as begun."""
        self.begun = True
        self._house.waiting_tokens -= work.prompt
        self.owner.backlog.add(work, -1)
        self.owner.backlog.add_begun(work)

    def end(self, work: Work, *, begun: bool) -> None:
        """Count work no more."""
        if begun:
            self.owner.backlog.add_begun(work, -1)
        else:
            self._house.waiting_tokens -= work.prompt
            self.owner.backlog.add(work, -1)

    def take_id(self, id: str) -> str:
        """Give the request this id, or one that begins with it if another request has it; returns it."""
        self.set_id(self._house.ids.free(id))
        return self.id

    def set_id(self, id: str) -> None:
        """Give the request this id, whoever has it."""
        self.id = id
        self._house.ids.put(id, self)

    def shrink(self, count: int) -> None:
        """Give back all places but so many. Without any the request is forgotten."""
        if count < self.count:
            self._house.leave(self, self.count - count)
            self.count = count

    def release(self) -> None:
        """Give back all places. Further calls do nothing."""
        self.shrink(0)


class Admissions:
    """Everything that was let in, and whether more can be."""

    def __init__(
        self,
        max_queued: int | None,
        max_tokens: int | None,
        engines: Engines,
        on_refusal: Callable[[], None],
    ) -> None:
        self.slots = 0
        """The sequences that the engines run at once."""
        self.live = 0
        """The number of places that are taken."""
        self.waiting_tokens = 0
        """Tokens of prompts that were sent to the engine and have no answer."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._max_queued = DEFAULT_QUEUE if max_queued is None else max_queued
        self.max_tokens = DEFAULT_QUEUED_TOKENS if max_tokens is None else max_tokens
        self.engines = engines
        self._on_refusal = on_refusal
        self._owners: dict[str, Owner] = {}
        self.ids = RequestsById[Admission]()

    @property
    def most(self) -> int:
        """The most sequences that may be here at once, those that run and those that wait."""
        return self.slots + self._max_queued

    def most_for(self, caller: Caller) -> int:
        """The most sequences that a caller may have here at once, if it has a queue of its own."""
        if caller.max_queued is None:
            return self.most
        return max(1, min(self.most, caller.max_queued + (caller.max_running or self.slots)))

    def check_room(self, caller: Caller) -> None:
        """Raises an error if not even a request for one sequence could get in."""
        self._check_queue(caller, 1)
        if self.live >= self._max_queued and self._excess(1) > 0:
            self._check_share(caller, 1)

    def check(self, caller: Caller, count: int) -> None:
        """Raises an error if a request for so many sequences cannot get in."""
        if (excess := self._excess(count)) > 0:
            self._check_share(caller, count)
            self._find_places(caller, count, excess)

    def take_free_place(self, caller: Caller) -> Admission | None:
        """Gives a place to a request of which only the head is known; None if another one has to lose it.

        Raises an error if not even a request for one sequence can get in.
        """
        self._check_queue(caller, 1)
        if self._excess(1) > 0:
            self._check_share(caller, 1)
            return None
        return self._enter(caller, 1)

    def admit(self, caller: Caller, count: int, taken: Admission | None = None, *, id: str = "") -> Admission:
        """Gives a place to each sequence of a request, or raises an error if it has to come back later.

        `taken` has one already. `id`: the request can be ended by this name, which others may have, too.
        """
        if count > (most := self.most_for(caller)):
            whose = "this server holds" if most == self.most else "your API key may have"
            raise BadRequest(
                f"The request is for {count} answers at once, and {whose} {most} at most: ask for fewer of "
                "them."
            )
        if taken is not None:
            self._extend(taken, caller, count - 1)
            return taken
        self._make_room(caller, count)
        admission = self._enter(caller, count)
        if id:
            admission.set_id(id)
        return admission

    def _extend(self, admission: Admission, caller: Caller, count: int) -> None:
        """Give so many more places to a request."""
        admission.check()
        self._make_room(caller, count)
        admission.owner.live += count
        self.live += count
        admission.count += count

    def _make_room(self, caller: Caller, count: int) -> None:
        self._check_queue(caller, count)
        if (excess := self._excess(count)) > 0:
            self._check_share(caller, count)
            for admission in self._find_places(caller, count, excess):
                self._end(admission)

    def _enter(self, caller: Caller, count: int) -> Admission:
        owner = self._owners.get(caller.owner)
        if owner is None:
            owner = self._owners[caller.owner] = Owner(caller.owner)
        owner.weight = caller.weight
        owner.live += count
        self.live += count
        self.idle.clear()
        admission = Admission(self, caller, owner, count)
        owner.admissions[admission] = None
        return admission

    def leave(self, admission: Admission, count: int) -> None:
        """Take back places of a request."""
        owner = admission.owner
        owner.live -= count
        self.live -= count
        if count == admission.count:
            del owner.admissions[admission]
            if admission.id:
                self.ids.drop(admission.id, admission)
        if not owner.admissions:
            del self._owners[owner.name]
        if not self.live:
            self.idle.set()

    def seconds_to_wait(self) -> int:
        """The seconds until all that is here now has been computed."""
        stats = self.engines.stats
        if stats is None or stats.rates is None:
            return FIRST_GUESS
        if stats.expected_wait > 0 and stats.running + stats.waiting >= self.live:
            return _whole(stats.expected_wait)  # it knows more, such as which prompts are cached
        return _whole(seconds_of([owner.backlog for owner in self._owners.values()], stats.rates))

    def _seconds_for(self, owner: Owner) -> int:
        """The seconds until all that an owner has here is computed, at its share of the engine."""
        stats = self.engines.stats
        if stats is None or stats.rates is None:
            return FIRST_GUESS
        weights = sum([each.weight for each in self._owners.values()])
        own = seconds_of([owner.backlog], stats.rates) * weights / owner.weight
        everything = seconds_of([each.backlog for each in self._owners.values()], stats.rates)
        return _whole(min(own, everything))

    def _excess(self, new: int) -> int:
        """How many sequences too many there would be with so many new ones; 0 or less if they fit."""
        if self.live + new <= self._max_queued:
            return 0  # whatever the engines report: these alone do not fill the queue
        return self.live + new - self._capacity()

    def _capacity(self) -> int:
        """The sequences that may be here at once: those that run, and those that may wait.

        The own count is exact but knows of no shortage of cache. The number of waiting sequences that the
        engine reports does, a moment late.
        """
        slots, stats = self.slots, self.engines.stats
        if stats is not None and stats.waiting:
            slots = min(slots, self.live - stats.waiting)
        return slots + self._max_queued

    def _check_queue(self, caller: Caller, count: int) -> None:
        """Raises an error if too many sequences of a caller would wait that may have only so many."""
        if caller.max_queued is None:
            return
        own = self._owners.get(caller.owner)
        live = 0 if own is None else own.live
        begun = 0 if own is None else sum([each.count for each in own.admissions if each.begun])
        free = max(0, self.slots - (self.live - live))
        could_run = min(free, caller.max_running) if caller.max_running else free
        if live + count - max(begun, could_run) > caller.max_queued:
            message = (
                f"Rate limit reached for {caller.owner}: {caller.max_queued} answers may wait at most. "
                f"{live} run or wait, and this request is for {count}. Try again later."
            )
            wait = self.seconds_to_wait() if own is None else self._seconds_for(own)
            self.refuse(TooManyRequests(message, retry_after=wait))

    def _check_share(self, caller: Caller, count: int) -> None:
        """Raises an error unless the caller would have no more than its share of the full server."""
        own = self._owners.get(caller.owner)
        live = 0 if own is None else own.live
        if len(self._owners) == (own is not None):
            self.refuse(Overloaded(_FULL, retry_after=self.seconds_to_wait()))
        share = max(1, int(self._places_for(caller) * caller.weight))
        if live + count > share:
            message = (
                f"The server is full, and your share of it is {share} answers at once: {live} of yours run "
                f"or wait, and this request is for {count}. Try again later."
            )
            wait = self.seconds_to_wait() if own is None else self._seconds_for(own)
            self.refuse(TooManyRequests(message, retry_after=wait))

    def _places_for(self, caller: Caller) -> float:
        """The places for a weight of 1, when the caller shares the server with all who are here."""
        others = sum([owner.weight for owner in self._owners.values() if owner.name != caller.owner])
        return max(1, self._capacity()) / (others + caller.weight)

    def _find_places(self, caller: Caller, new: int, missing: int) -> list[Admission]:
        """The newest waiting requests of those who have more than their share, with enough places in all."""
        places = self._places_for(caller)
        own = self._owners.get(caller.owner)
        after = (new + (0 if own is None else own.live)) / caller.weight
        live = {owner: owner.live for owner in self._owners.values() if owner is not own}
        newest = {owner: _waiting(owner) for owner in live}
        found: list[Admission] = []
        while missing > 0:
            most = max(newest, key=lambda owner: live[owner] / owner.weight, default=None)
            if most is None or live[most] / most.weight <= max(places, after):
                self.refuse(Overloaded(_FULL, retry_after=self.seconds_to_wait()))
            admission = next(newest[most], None)
            if admission is None:
                del newest[most]
                continue
            found.append(admission)
            live[most] -= admission.count
            missing -= admission.count
        return found

    def _end(self, admission: Admission) -> None:
        """End a request of which no answer has come, because another owner has a right to its places."""
        self._on_refusal()
        admission.refusal = TooManyRequests(_SHED, retry_after=self._seconds_for(admission.owner))
        streams = list(admission.streams)
        admission.release()
        self.engines.abort(streams)

    def refuse(self, error: ApiError) -> NoReturn:
        self._on_refusal()
        raise error


def _waiting(owner: Owner) -> Iterator[Admission]:
    """Its requests of which no answer has come, the newest first."""
    return (each for each in reversed(owner.admissions) if not each.begun)


def _whole(seconds: float) -> int:
    return max(1, min(MAX_WAIT, math.ceil(seconds)))
