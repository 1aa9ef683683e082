"""Late-interaction queries, and which replica keeps the vectors of each, to score documents against."""

from __future__ import annotations

from collections import OrderedDict

from engine_core.protocol import Add
from worker.protocol import Pooling

MOST = 1 << 10
"""The most queries that are remembered: more than the requests that are scored at a time."""


class LateQueries:
    """The queries that were sent last. One is sent again if the engine that kept its vectors has ended."""

    def __init__(self) -> None:
        self._queries: OrderedDict[str, tuple[Add, int | None]] = OrderedDict()
        """Name -> the query and the replica that keeps its vectors."""

    def note(self, add: Add, replica: int) -> None:
        """Note that this replica gets a request; only queries are remembered."""
        if isinstance(add.params, Pooling) and (name := add.params.late_query):
            self._queries[name] = add, replica
            self._queries.move_to_end(name)
            if len(self._queries) > MOST:
                self._queries.popitem(last=False)

    def holder(self, add: Add) -> int | None:
        """The replica that keeps the vectors for which a document asks."""
        return self._queries.get(_asked(add), (None, None))[1]

    def missing(self, add: Add, replica: int) -> Add | None:
        """The query that this replica must have got before a document, and has not."""
        query, holder = self._queries.get(_asked(add), (None, None))
        return query if holder != replica else None

    def lose(self, replica: int) -> None:
        """Forget what a replica kept, which has ended."""
        for name, (add, holder) in self._queries.items():
            if holder == replica:
                self._queries[name] = add, None


def _asked(add: Add) -> str:
    return add.params.late_document if isinstance(add.params, Pooling) else ""
