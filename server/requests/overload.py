"""Refuses requests while the queue is full, and says after how many seconds to try again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from server.errors import Overloaded

DEFAULT_QUEUE = 8192
"""Waiting requests when --max-num-queued-reqs is not given: more than any client would wait for."""

FIRST_GUESS = 5
"""Seconds to wait, while too few requests have finished to know their rate."""
MAX_WAIT = 60


class OverloadGuard:
    """Refuses what would wait behind a full queue, before it costs the engine anything."""

    def __init__(self, max_queued: int | None, on_refusal: Callable[[], None]) -> None:
        self._max_queued = DEFAULT_QUEUE if max_queued is None else max_queued
        self._on_refusal = on_refusal
        self._finished: deque[float] = deque(maxlen=64)
        """Times at which the latest requests finished, on the monotonic clock."""

    def note_finished(self) -> None:
        self._finished.append(time.monotonic())

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
                retry_after=self.seconds_until_free(waiting),
            )

    def seconds_until_free(self, waiting: int) -> int:
        """How long `waiting` requests take at the rate of the latest ones."""
        if len(self._finished) < 2:
            return FIRST_GUESS
        each = (time.monotonic() - self._finished[0]) / len(self._finished)
        return min(MAX_WAIT, max(1, math.ceil(each * waiting)))
