"""The table of replicas in one API server: which there are, which work, which one gets a request.

A request goes to the replica that will have the fewest tokens to compute once it has this request too. Those
are the tokens that it has in flight already, plus those of this prompt that it does not hold from requests
before it. So a request follows its prefix, unless that replica is busier by more tokens than the prefix
saves; then it goes to another one, and from then on both hold the prefix. Equals take turns. A document of
late interaction follows the query to whose vectors it is compared. Nothing is sent here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count

from engine_core.client.in_flight import InFlight, can_go_on
from engine_core.client.replica import (
    EndCode,
    Replica,
    Stalled,
    all_progress,
    all_ready,
    all_stats,
    difference,
)
from engine_core.config import Replicas
from engine_core.engine_stats import Stats
from engine_core.prompt_media import overlapping
from engine_core.protocol import AddRequest, Progress, Ready
from worker.protocol import Pooling

BLOCK = 64
"""Tokens in each block of a prompt that is hashed: near the size of cache blocks, whichever that is."""
LONGEST = 256
"""Blocks of a prompt that are looked at: those beyond add work and change no choice."""
REMEMBERED = 1 << 16
"""The most blocks that are remembered, of all prompts together: some ten megabytes."""
LEAST_WAIT, STARTS_TO_WAIT = 10.0, 3.0
"""The least seconds for which requests wait for an engine that is started again, and the multiple of the time
that its last start took: the next may come on a machine that is busier."""
MOST_QUERIES = 1 << 10
"""The most late-interaction queries that are remembered: more than the requests that are scored at a time."""


class ReplicaRouter:
    """Remembers which replica has computed which prefixes, and chooses one for each request."""

    def __init__(self) -> None:
        self.remembered = REMEMBERED
        """The most blocks to remember for all replicas: their caches hold no more."""
        self._holders: OrderedDict[int, set[int]] = OrderedDict()
        """Hash of all tokens up to the end of a block -> the replicas that have computed them."""
        self._turns = count(1)
        self._last_turn: dict[int, int] = {}

    def choose(self, add: AddRequest, loads: Mapping[int, int], *, remember: bool = True) -> tuple[int, int]:
        """Choose a replica; returns it, and how many tokens this request adds to its load.

        `loads` holds the replicas that can be chosen, with the tokens that each has in flight. Without
        `remember` no cache keeps the prompt.
        """
        blocks = list(_hashes(add)) if remember and len(loads) > 1 else []
        held = self._held(blocks, loads)
        chosen = min(loads, key=lambda one: (loads[one] - BLOCK * held[one], self._last_turn.get(one, 0)))
        self._last_turn[chosen] = next(self._turns)
        self._remember(blocks, chosen)
        return chosen, len(add.tokens) - BLOCK * held[chosen]

    def forget(self, replicas: Iterable[int]) -> None:
        """Forget all that these replicas held, because their caches are empty."""
        gone = set(replicas)
        for block, holders in list(self._holders.items()):
            holders -= gone
            if not holders:
                del self._holders[block]

    def _held(self, blocks: list[int], replicas: Iterable[int]) -> dict[int, int]:
        """Replica -> how many leading blocks of a prompt it holds."""
        held = dict.fromkeys(replicas, 0)
        for index, block in enumerate(blocks):
            holders = self._holders.get(block)
            if holders is None:
                break
            for one in holders:
                if held.get(one) == index:  # all blocks before this one, too
                    held[one] = index + 1
        return held

    def _remember(self, blocks: list[int], replica: int) -> None:
        # The last block first, so that what several prompts share is forgotten last.
        for block in reversed(blocks):
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self.remembered:
            self._holders.popitem(last=False)


def _hashes(add: AddRequest) -> Iterator[int]:
    """The hash of each whole block of a prompt, its media included, together with all before it."""
    source = add.source.hash if add.source else ""
    chain, tokens = hash((add.salt, add.adapter, source)), add.tokens
    for end in range(BLOCK, min(len(tokens), BLOCK * LONGEST) + 1, BLOCK):
        start = end - BLOCK
        chain = hash((chain, tuple(tokens[start:end])))
        for media in overlapping(add.media, start, end):
            chain = hash((chain, media.hash, media.at - start))
        yield chain


class LateQueries:
    """The late-interaction queries that were sent last, and which replica keeps the vectors of each."""

    def __init__(self) -> None:
        self._queries: OrderedDict[str, tuple[AddRequest, int | None]] = OrderedDict()
        """Name -> the query and the replica that keeps its vectors."""

    def note(self, add: AddRequest, replica: int) -> None:
        """Note that this replica gets a request; only queries are remembered."""
        if isinstance(add.params, Pooling) and (name := add.params.late_query):
            self._queries[name] = add, replica
            self._queries.move_to_end(name)
            if len(self._queries) > MOST_QUERIES:
                self._queries.popitem(last=False)

    def holder(self, add: AddRequest) -> int | None:
        """The replica that keeps the vectors for which a document asks."""
        return self._queries.get(_asked(add), (None, None))[1]

    def missing(self, add: AddRequest, replica: int) -> AddRequest | None:
        """The query that this replica must get before a document, if it has not got it. Call this once."""
        query, holder = self._queries.get(_asked(add), (None, None))
        if query is None or holder == replica:
            return None
        self.note(query, replica)
        return query

    def lose(self, replica: int) -> None:
        """Forget what a replica kept, which has ended."""
        for name, (add, holder) in self._queries.items():
            if holder == replica:
                self._queries[name] = add, None


def _asked(add: AddRequest) -> str:
    return add.params.late_document if isinstance(add.params, Pooling) else ""


_log = logging.getLogger(__name__)


class ReplicaTable:
    def __init__(self, layout: Replicas, servers: int) -> None:
        self.layout = layout
        self.ready: Ready | None = None
        """The facts of all replicas that work, as of one engine."""
        self.replicas = {number: Replica(number) for number in layout.local}
        self._several_servers = servers > 1
        self._router = ReplicaRouter()
        self.late_queries = LateQueries()

    @property
    def restart_wait(self) -> float:
        """The seconds for which a request waits for a replica to be started again, by what starts took."""
        slowest = max((one.start_seconds for one in self.replicas.values()), default=0.0)
        return max(LEAST_WAIT, STARTS_TO_WAIT * slowest)

    @property
    def progress(self) -> Progress:
        known = list(self.replicas.values())
        return all_progress(known) if known else Progress(phase="start", fraction=0.0)

    @property
    def stats(self) -> Stats | None:
        return all_stats([one for one in self.replicas.values() if one.lost is None])

    @property
    def hopeless(self) -> bool:
        """Whether every replica is given up. On a machine that runs none itself, others may still connect."""
        return bool(self.layout.started) and all(one.given_up for one in self.replicas.values())

    @property
    def restarting(self) -> EndCode | Stalled | None:
        """How the last replica ended, while none works and one will be back; or that all that work stall."""
        if self.ready is not None:
            for one in self.replicas.values():
                if not one.stalled and one.works:
                    return None
            return "engine_stalled"
        if self.hopeless:
            return None
        return next((one.end_code for one in self.replicas.values() if one.end_code is not None), None)

    def find(self, number: int) -> Replica | None:
        """The replica of that number, which may be a new one from another machine; None if it is too high."""
        if number not in self.layout.numbers:
            _log.error("an engine has the number %d, of %d: it gets nothing", number, self.layout.size)
            return None
        return self.replicas.setdefault(number, Replica(number))

    def set_ready(self, replica: Replica, ready: Ready) -> str | None:
        """Let a replica work from now on; if it is not like the others, return why it cannot."""
        others = all_ready([one for one in self.replicas.values() if one.works and one is not replica])
        if others is not None and (unlike := difference(ready, others)):
            return f"it is not a replica of the others: {unlike}"
        replica.begin_work(ready)
        return None

    def lose(self, replica: Replica, reason: str) -> list[Replica]:
        """Note that a replica has ended; returns it and the others that end with it.

        If it leaves, or ends because of another one, others are still to say how they end.
        """
        ended = [replica]
        if self.layout.together:
            others = [one for one in self.replicas.values() if one.lost is None and one is not replica]
            ended += [] if replica.leaving else others
            for one in others:
                one.stalled = not one.leaving  # it gets nothing more
        for one in ended:
            one.lose(
                reason if one is replica else f"engine {replica.number} has ended, and shares experts with it"
            )
            self._router.forget([one.number])
            self.late_queries.lose(one.number)
        return ended

    def forget_prefixes(self) -> None:
        self._router.forget(self.replicas)

    def refresh(self) -> bool:
        """Find `ready` again after something may have changed; returns whether it is another."""
        before, self.ready = self.ready, all_ready([one for one in self.replicas.values() if one.works])
        if self.ready is not None:
            worker = self.ready.worker
            self._router.remembered = min(REMEMBERED, worker.cached_tokens // BLOCK)
        return self.ready != before

    def may_take(self, request: InFlight) -> bool:
        """Whether a replica that cannot take the request now may be able to later."""
        if request.pin is None:
            return not self.hopeless
        pinned = self.replicas.get(request.pin)
        return not pinned.given_up if pinned is not None else request.pin in self.layout.numbers

    @property
    def goes_on(self) -> bool:
        """Whether a replica takes requests, or will when it has started again: not all of them leave."""
        return any(not (one.leaving or one.given_up) for one in self.replicas.values())

    def choose(self, request: InFlight, without: Collection[int]) -> tuple[Replica, int] | None:
        """A replica and the tokens that the request adds to its load; None if no replica can take it now."""
        add = request.add
        loads = {
            number: one.load(others=self._several_servers)
            for number, one in self.replicas.items()
            if one.takes_requests and number not in without
        }
        if request.emitted:
            loads = {
                number: load
                for number, load in loads.items()
                if (ready := self.replicas[number].ready) is not None and can_go_on(request, ready.worker)
            }
        if request.pin is not None:
            loads = {request.pin: loads[request.pin]} if request.pin in loads else {}
        elif (holder := self.late_queries.holder(add)) is not None and holder in loads:
            loads = {holder: loads[holder]}
        if not loads:
            return None
        remember = self.ready is not None and self.ready.enable_prefix_caching
        number, tokens = self._router.choose(add, loads, remember=remember)
        self.late_queries.note(add, number)
        return self.replicas[number], tokens
