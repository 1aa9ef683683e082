"""Lets requests in: one decision for a whole request, before it costs anything.

A server has as many places as sequences that run, and as may wait (`--max-num-queued-reqs`). While it is not
full, whoever comes gets in. When it is, places belong to owners by their weights: who has more than that is
refused with 429, and to one who has less the newest waiting request of those who have more makes room. Who is
alone with a full server is refused with 503.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from engine_core.engine_stats import Stats, expected_length
from engine_core.protocol import Standing
from server.access.client_identity import Caller
from server.access.retry_after import seconds_until_done, whole_seconds
from server.errors import ApiError, BadRequest, Overloaded, TooManyRequests

DEFAULT_QUEUE = 8192
"""Waiting sequences when --max-num-queued-reqs is not given: more than any client would wait for."""
DEFAULT_QUEUED_TOKENS = 1 << 22
"""Waiting tokens when --max-num-queued-tokens is not given: two times some 200 MB, here and in the engine."""

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


@dataclass(slots=True, eq=False)
class Owner:
    """The requests of one owner that are in the server, and what they still are for the engine, in tokens."""

    name: str
    weight: float = 1.0
    live: int = 0
    """The places that it has."""
    admissions: dict[Admission, None] = field(default_factory=dict)
    """Its requests, the oldest first."""
    prompts: int = 0
    """Tokens of prompts and texts that wait."""
    answers: float = 0.0
    """Tokens of answers that are expected. Answers that have begun are half done."""


class Work:
    """One choice, or texts to be pooled, of a request that was let in: from its sending to its end."""

    __slots__ = ("_admission", "_answer", "_prompt", "begun")

    def __init__(self, admission: Admission, prompt: int, answer: float) -> None:
        """`prompt` tokens are to be read, and `answer` tokens to be generated, as far as is known."""
        self._admission, self._prompt, self._answer = admission, prompt, answer
        self.begun = False
        """Whether its first token has come."""
        admission.count_work(prompt, answer)

    def begin(self) -> None:
        self.begun = self._admission.begun = True
        self._admission.count_work(-self._prompt, -self._answer / 2)

    def end(self) -> None:
        if self.begun:  # half of its answer is counted no more, nor its prompt
            self._admission.owner.answers -= self._answer / 2
        else:
            self._admission.count_work(-self._prompt, -self._answer)


@dataclass(slots=True, eq=False)
class Admission:
    """A request that was let in, until `release`. It has a place for each of its sequences."""

    _admissions: Admissions
    caller: Caller
    owner: Owner
    count: int = 0
    """The places that it still has."""
    since: float = 0.0
    """The moment of its arrival on the monotonic clock, if it came by HTTP."""
    begun: bool = False
    """Whether an answer has come: from then on nobody else gets its places."""
    id: str = ""
    """The name by which it can be ended, if it has one."""
    streams: set[int] = field(default_factory=set)
    """Numbers of its streams from the engine."""
    refusal: ApiError | None = None
    """The error that ends it, because others need its places."""

    def check(self) -> None:
        """Raises the error that ends the request, if others got its places."""
        if self.refusal is not None:
            raise self.refusal

    async def standing(self) -> Standing | None:
        """How far the first of its sequences has come that an engine has; None if no engine says so."""
        return await self._admissions.engines.standing(min(self.streams)) if self.streams else None

    def check_tokens(self, tokens: int) -> None:
        """Refuses the request if its prompts, which have so many tokens in all, would be too much to wait."""
        waiting = self._admissions.waiting_tokens
        if waiting and waiting + tokens > self._admissions.max_tokens:
            self._admissions.refuse(Overloaded(_MUCH_TO_READ, retry_after=self._admissions.seconds_to_wait()))

    def read(self, tokens: int) -> None:
        """Count the tokens of the prompts against the quotas of the caller's key."""
        if self.caller.account is not None:
            self.caller.account.read(tokens)

    def begin_work(self, prompt: int, most: int = 0, *, may_stop: bool = False) -> Work:
        """Count work that is sent to the engine: an answer of `most` tokens, which `may_stop` before."""
        return Work(self, prompt, self._admissions.expected_answer(most) if may_stop else most)

    def count_work(self, prompt: int, answer: float) -> None:
        """Change what waits for the engine by so many tokens."""
        self._admissions.waiting_tokens += prompt
        self.owner.prompts += prompt
        self.owner.answers += answer

    def take_id(self, id: str) -> str:
        """Give the request this id, or one that begins with it if another request has it; returns it."""
        free = id
        while free in self._admissions.by_id:
            free = f"{id}-{secrets.token_hex(4)}"
        self.set_id(free)
        return free

    def set_id(self, id: str) -> None:
        """Give the request this id, whoever has it."""
        self.id = id
        self._admissions.by_id.setdefault(id, []).append(self)

    def shrink(self, count: int) -> None:
        """Give back all places but so many. Without any the request is forgotten."""
        if count < self.count:
            self._admissions.leave(self, self.count - count)
            self.count = count

    def release(self) -> None:
        """Give back all places. Further calls do nothing."""
        if self.count:
            self.shrink(0)


class Admissions:
    """Everything that was let in, and whether more can be."""

    def __init__(
        self, max_queued: int | None, max_tokens: int | None, engines: Engines, on_refusal: Callable[[], None]
    ) -> None:
        self.slots = 0
        """The sequences that the engines run at once."""
        self.live = self.given = 0
        """The places that are taken now, and all that were ever given."""
        self.waiting_tokens = 0
        """Tokens of prompts that were sent to the engine and have no answer."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._max_queued = DEFAULT_QUEUE if max_queued is None else max_queued
        self.max_tokens = DEFAULT_QUEUED_TOKENS if max_tokens is None else max_tokens
        self.engines = engines
        self.on_refusal = on_refusal
        self._owners: dict[str, Owner] = {}
        self.by_id: dict[str, list[Admission]] = {}
        """Requests by their ids. Programs that use the engine directly may give several the same id."""

    @property
    def most(self) -> int:
        """The most sequences that may be here at once, those that run and those that wait."""
        return self.slots + self._max_queued

    def most_for(self, caller: Caller) -> int:
        """The most sequences that a caller may have here at once, if it has a queue of its own."""
        if caller.max_queued is None:
            return self.most
        return max(1, min(self.most, caller.max_queued + (caller.max_running or self.slots)))

    def _owner(self, caller: Caller) -> Owner:
        return self._owners.get(caller.owner) or Owner(caller.owner)

    def check_room(self, caller: Caller) -> bool:
        """Raises an error if not even a request for one sequence could get in.

        Returns whether one could without another one's losing its place.
        """
        if self._excess(caller, 1) <= 0:
            return True
        self._check_share(caller, 1)
        return False

    def take_free_place(self, caller: Caller) -> Admission | None:
        """Gives a place to a request of which only the head is known; None if another one has to lose it.

        Raises an error if not even a request for one sequence can get in.
        """
        return self._give(caller, 1) if self.check_room(caller) else None

    def admit(self, caller: Caller, count: int, taken: Admission | None = None) -> Admission:
        """Gives a place to each sequence of a request, or raises an error if it has to come back later.

        `taken` has one already.
        """
        if count > 1 and count > (most := self.most_for(caller)):
            whose = "this server holds" if most == self.most else "your API key may have"
            raise BadRequest(
                f"The request is for {count} answers at once, and {whose} {most} at most: ask for fewer of "
                "them."
            )
        if taken is not None:
            taken.check()
            count -= taken.count
            if not count:
                return taken
        if (excess := self._excess(caller, count)) > 0:
            self._check_share(caller, count)
            for other in self._find_places(caller, count, excess):
                self._end(other)
        return self._give(caller, count, taken)

    def _give(self, caller: Caller, count: int, to: Admission | None = None) -> Admission:
        """Gives so many more places to a request, or to a new one of this caller."""
        if to is None:
            owner = self._owners[caller.owner] = self._owner(caller)
            owner.weight = caller.weight
            to = Admission(self, caller, owner)
            owner.admissions[to] = None
            self.idle.clear()
        to.count += count
        to.owner.live += count
        self.live += count
        self.given += count
        return to

    def leave(self, admission: Admission, count: int) -> None:
        """Take back places of a request."""
        owner = admission.owner
        owner.live -= count
        self.live -= count
        if count == admission.count:
            del owner.admissions[admission]
            if admission.id:
                self.by_id[admission.id].remove(admission)
                if not self.by_id[admission.id]:
                    del self.by_id[admission.id]
        if not owner.admissions:
            del self._owners[owner.name]
        if not self.live:
            self.idle.set()

    def expected_answer(self, most: int) -> float:
        """The tokens of an answer that may stop before it has as many as it may."""
        stats = self.engines.stats
        return most if stats is None or stats.rates is None else expected_length(most, stats.rates.stop_rate)

    def seconds_to_wait(self) -> int:
        """The seconds until all that is here now has been computed."""
        stats = self.engines.stats
        if stats is not None and stats.expected_wait > 0 and stats.running + stats.waiting >= self.live:
            return whole_seconds(stats.expected_wait)  # it knows more, such as which prompts are cached
        return self._seconds_for()

    def _seconds_for(self, owner: Owner | None = None) -> int:
        return seconds_until_done(self.engines.stats, self._owners.values(), owner)

    def _excess(self, caller: Caller, new: int) -> int:
        """How many sequences too many there would be with so many new ones of a caller; 0 or less if they
        fit. Raises an error if too many of that caller would wait."""
        if caller.max_queued is not None:
            self._check_queue(caller, caller.max_queued, new)
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

    def _check_queue(self, caller: Caller, most: int, count: int) -> None:
        """Raises an error if more sequences of a caller would wait than it may have."""
        own = self._owner(caller)
        begun = sum([each.count for each in own.admissions if each.begun])
        free = max(0, self.slots - (self.live - own.live))
        could_run = min(free, caller.max_running) if caller.max_running else free
        if own.live + count - max(begun, could_run) > most:
            self._refuse_rate(
                own,
                f"Rate limit reached for {caller.owner}: {most} answers may wait at most. "
                f"{own.live} run or wait, and this request is for {count}. Try again later.",
            )

    def _check_share(self, caller: Caller, count: int) -> None:
        """Raises an error unless the caller would have no more than its share of the full server."""
        own = self._owner(caller)
        if self._owners.keys() <= {caller.owner}:
            self.refuse(Overloaded(_FULL, retry_after=self.seconds_to_wait()))
        share = max(1, int(self._places_for(caller) * caller.weight))
        if own.live + count > share:
            self._refuse_rate(
                own,
                f"The server is full, and your share of it is {share} answers at once: {own.live} of yours "
                f"run or wait, and this request is for {count}. Try again later.",
            )

    def _refuse_rate(self, owner: Owner, message: str) -> NoReturn:
        """Refuses a request because of what its owner has here already."""
        wait = self._seconds_for(owner) if owner.live else self.seconds_to_wait()
        self.refuse(TooManyRequests(message, retry_after=wait))

    def _places_for(self, caller: Caller) -> float:
        """The places for a weight of 1, when the caller shares the server with all who are here."""
        others = sum([owner.weight for owner in self._owners.values() if owner.name != caller.owner])
        return max(1, self._capacity()) / (others + caller.weight)

    def _find_places(self, caller: Caller, new: int, missing: int) -> list[Admission]:
        """The newest waiting requests of those who have more than their share, with enough places in all."""
        places = self._places_for(caller)
        after = (new + self._owner(caller).live) / caller.weight
        live = {owner: owner.live for owner in self._owners.values() if owner.name != caller.owner}
        newest = {owner: (one for one in reversed(owner.admissions) if not one.begun) for owner in live}
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
        self.on_refusal()
        admission.refusal = TooManyRequests(_SHED, retry_after=self._seconds_for(admission.owner))
        admission.release()
        self.engines.abort(list(admission.streams))

    def refuse(self, error: ApiError) -> NoReturn:
        self.on_refusal()
        raise error
