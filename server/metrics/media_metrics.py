"""The metrics of media, which servers have whose models take any."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from server.errors import ApiError

Stage = Literal["read", "prepare"]
"""Reading a file from where it is, and decoding and resizing it."""


class Counts(Protocol):
    def inc(self, amount: float = 1, /) -> None: ...


class Observes(Protocol):
    def observe(self, value: float, /) -> None: ...


class MediaMetrics:
    def __init__(
        self,
        queries: Counts,
        hits: Counts,
        seconds: Callable[[Stage], Observes],
        refused: Callable[[str], Counts],
    ) -> None:
        """`seconds` finds the histogram of a stage, and `refused` the counter of a reason."""
        self._queries, self._hits = queries, hits
        self._seconds, self._refused = seconds, refused
        self._counted = (0, 0)

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Observes how long a stage takes, and counts it if the item is refused there."""
        since = time.monotonic()
        try:
            yield
        except ApiError as error:
            self.refuse("busy" if error.status == 503 else stage)
            raise
        self._seconds(stage).observe(time.monotonic() - since)

    def refuse(self, reason: str) -> None:
        self._refused(reason).inc()

    def count_lookups(self, queries: int, hits: int) -> None:
        """Takes over how often kept items were looked up and found so far."""
        self._queries.inc(queries - self._counted[0])
        self._hits.inc(hits - self._counted[1])
        self._counted = queries, hits
