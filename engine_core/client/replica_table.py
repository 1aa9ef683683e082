"""The table of replicas in one API server: which there are, which work, what they can do together.

It also chooses the replica for a request. It sends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from msgspec.structs import replace

from engine_core.client.in_flight import InFlight
from engine_core.client.replica import Replica, all_progress, all_ready, all_stats, difference
from engine_core.client.routing import BLOCK, REMEMBERED, Router
from engine_core.config import Replicas
from engine_core.protocol import Progress, Ready, Stats
from worker.protocol import Pooling

_log = logging.getLogger(__name__)


class ReplicaTable:
    def __init__(self, layout: Replicas, servers: int) -> None:
        """`servers` is how many API servers send requests to these replicas."""
        self.layout = layout
        self.ready: Ready | None = None
        """The facts of all replicas that work, as of one engine."""
        self.replicas = {number: Replica(number) for number in layout.local}
        """The replicas of this machine, and those that have called from others."""
        self._several_servers = servers > 1
        self._router = Router()

    @property
    def progress(self) -> Progress:
        known = list(self.replicas.values())
        return all_progress(known) if known else Progress(phase="start", fraction=0.0)

    @property
    def stats(self) -> Stats | None:
        """The statistics of all replicas together."""
        return all_stats([one for one in self.replicas.values() if one.lost is None])

    @property
    def all_lost(self) -> bool:
        """Whether no replica is left. On a machine that runs none itself, others may still connect."""
        return bool(self.layout.here) and all(one.lost is not None for one in self.replicas.values())

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
        replica.ready = ready
        replica.progress = replace(replica.progress, phase="ready", fraction=1.0)
        return None

    def lose(self, replica: Replica, reason: str) -> None:
        replica.lose(reason)
        self._router.forget([replica.number])

    def forget_prefixes(self) -> None:
        self._router.forget(self.replicas)

    def refresh(self) -> bool:
        """Find `ready` again after something may have changed; returns whether it is another."""
        before, self.ready = self.ready, all_ready([one for one in self.replicas.values() if one.works])
        if self.ready is not None:
            worker = self.ready.worker
            self._router.remembered = min(REMEMBERED, worker.num_blocks * worker.block_size // BLOCK)
        return self.ready != before

    def choose(self, request: InFlight, without: Collection[int]) -> tuple[Replica, int] | None:
        """A replica and the tokens that the request adds to its load; None if no replica can take it now."""
        add = request.add
        loads = {
            number: one.load(others=self._several_servers)
            for number, one in self.replicas.items()
            if one.takes_requests and number not in without
        }
        if request.pin is not None:
            loads = {request.pin: loads[request.pin]} if request.pin in loads else {}
        elif isinstance(add.params, Pooling) and add.params.late_document:
            holder = self._router.replica_of_query(add.params.late_document)
            loads = {holder: loads[holder]} if holder in loads else loads
        if not loads:
            return None
        remember = self.ready is not None and self.ready.enable_prefix_caching
        number, tokens = self._router.choose(add.tokens, loads, salt=add.salt, remember=remember)
        if isinstance(add.params, Pooling) and add.params.late_query:
            self._router.remember_query(add.params.late_query, number)
        return self.replicas[number], tokens
