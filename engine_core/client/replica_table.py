"""The table of replicas in one API server: which there are, which work, what they can do together.

It also chooses the replica for a request. It sends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from engine_core.client.in_flight import InFlight
from engine_core.client.replica import (
    EndCode,
    Replica,
    Stalled,
    all_progress,
    all_ready,
    all_stats,
    difference,
)
from engine_core.client.routing import BLOCK, REMEMBERED, LateQueries, Router
from engine_core.client.takeover import can_go_on
from engine_core.config import Replicas
from engine_core.protocol import Progress, Ready, Stats

_log = logging.getLogger(__name__)


class ReplicaTable:
    def __init__(self, layout: Replicas, servers: int) -> None:
        self.layout = layout
        self.ready: Ready | None = None
        """The facts of all replicas that work, as of one engine."""
        self.replicas = {number: Replica(number) for number in layout.local}
        self._several_servers = servers > 1
        self._router = Router()
        self.late_queries = LateQueries()

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
        return bool(self.layout.here) and all(one.given_up for one in self.replicas.values())

    @property
    def restarting(self) -> EndCode | Stalled | None:
        """How the last replica ended, while none works and one will be back; or that all that work stall."""
        if self.ready is not None:
            stalled = all(one.stalled for one in self.replicas.values() if one.works)
            return "engine_stalled" if stalled else None
        if self.hopeless:
            return None
        return next((one.end_code for one in self.replicas.values() if one.end_code is not None), None)

    def find(self, number: int) -> Replica | None:
        """The replica of that number, which may be a new one from another machine; None if it is too high."""
        if not 0 <= number < self.layout.size:
            _log.error("an engine has the number %d, of %d: it gets nothing", number, self.layout.size)
            return None
        return self.replicas.setdefault(number, Replica(number))

    def set_ready(self, replica: Replica, ready: Ready) -> str | None:
        """Let a replica work from now on; if it is not like the others, return why it cannot."""
        others = all_ready([one for one in self.replicas.values() if one.works and one is not replica])
        if others is not None and (unlike := difference(ready, others)):
            return f"it is no replica of the others: {unlike}"
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
            self._router.remembered = min(REMEMBERED, worker.num_blocks * worker.block_size // BLOCK)
        return self.ready != before

    def may_take(self, request: InFlight) -> bool:
        """Whether a replica that cannot take the request now may be able to later."""
        if request.pin is None:
            return not self.hopeless
        pinned = self.replicas.get(request.pin)
        return not pinned.given_up if pinned is not None else request.pin < self.layout.size

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
            loads = {number: load for number, load in loads.items() if self._can_go_on(request, number)}
        if request.pin is not None:
            loads = {request.pin: loads[request.pin]} if request.pin in loads else {}
        elif (holder := self.late_queries.holder(add)) is not None and holder in loads:
            loads = {holder: loads[holder]}
        if not loads:
            return None
        remember = self.ready is not None and self.ready.enable_prefix_caching
        number, tokens = self._router.choose(add.tokens, loads, salt=add.salt, remember=remember)
        self.late_queries.note(add, number)
        return self.replicas[number], tokens

    def _can_go_on(self, request: InFlight, number: int) -> bool:
        ready = self.replicas[number].ready
        return ready is not None and can_go_on(request, ready.worker)
