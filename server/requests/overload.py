"""Refuses requests while the queue is full, and says after how many seconds to try again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engine_core.client.replica import Replica
from server.errors import Overloaded

DEFAULT_QUEUE = 8192
"""Waiting requests when --max-num-queued-reqs is not given: more than any client would wait for."""

FIRST_GUESS = 5
"""Seconds to wait, while no engine has said how long requests wait."""
MAX_WAIT = 60


class OverloadGuard:
    """Refuses what would wait behind a full queue, before it costs the engine anything."""

    def __init__(
        self,
        max_queued: int | None,
        on_refusal: Callable[[], None],
        replicas: Callable[[], Sequence[Replica]],
    ) -> None:
        self._max_queued = DEFAULT_QUEUE if max_queued is None else max_queued
        self._on_refusal = on_refusal
        self._replicas = replicas

    def check(self, new: int, live: int, slots: int, reported: int) -> None:
        """Raises Overloaded if `new` sequences, beside the `live` ones of this server, would wait too long.

        The server's own count is exact but knows of no shortage of cache. The number of waiting sequences
        that the engine `reported` does, a moment late.
        """
        waiting = max(live + new - slots, reported + new if reported else 0)
        if waiting > self._max_queued:
            self._on_refusal()
            raise Overloaded(
                "The engine is currently busy and cannot accept new requests. Please try again later or on a "
                "different instance.",
                retry_after=self.seconds_to_wait(),
            )

    def seconds_to_wait(self) -> int:
        """The shortest wait that a replica that takes requests expects for a new one."""
        waits = [one.stats.expected_wait for one in self._replicas() if one.takes_requests and one.stats]
        known = [wait for wait in waits if wait > 0]
        return min(MAX_WAIT, math.ceil(min(known))) if known else FIRST_GUESS
