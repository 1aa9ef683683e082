"""The requests in flight, and the replica that has each, from submission to the last answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from engine_core.client.in_flight import InFlight
from engine_core.client.replica import Replica
from engine_core.client.replica_table import ReplicaTable
from engine_core.client.streams import is_terminal
from engine_core.protocol import Abort, AddMany, Admitted, Failed, Pooled, Request, Tokens
from engine_core.wire.transport import RequestTooLarge, Unreachable

_TOKENS_IN_FRAME = 1 << 17
"""The most tokens of several requests in one frame. An engine computes one while the next is written."""

_ABORTED = "the request was ended before it was done"
_HALF_DONE = "the replica that was generating this answer has ended: send the request again"
_NO_REPLICA = "no engine can take requests now"

_log = logging.getLogger(__name__)


class Dispatcher:
    """Sends requests to replicas. Each gets exactly one terminal answer, whatever becomes of the engines."""

    def __init__(self, table: ReplicaTable, send: Callable[[int, Request], None]) -> None:
        """`send` sends to the engine of a number. It raises Unreachable or RequestTooLarge."""
        self._table = table
        self._send = send
        self._in_flight: dict[int, InFlight] = {}
        self._closed: str | None = None

    def __len__(self) -> int:
        """The number of requests in flight."""
        return len(self._in_flight)

    def dispatch(self, requests: Sequence[InFlight], without: frozenset[int] = frozenset()) -> None:
        """Send each request to the replica that is best for it, but to none of `without`."""
        batches: dict[int, list[InFlight]] = {}
        for one in requests:
            chosen = self._table.choose(one, without) if self._closed is None else None
            if chosen is None:
                nobody = _NO_REPLICA if one.pin is None else f"replica {one.pin} takes no requests now"
                self._fail(one, 503, self._closed or nobody)
            else:
                self._in_flight[one.id] = one
                one.assign(*chosen)
                batches.setdefault(chosen[0].number, []).append(one)
        for number, batch in batches.items():
            start = 0
            for stop in _frame_ends(batch):
                self._send_batch(number, batch[start:stop], without)
                start = stop

    def deliver(self, replica: Replica, output: Admitted | Tokens | Pooled | Failed) -> None:
        """Put an output of this replica into the stream of its request."""
        one = self._in_flight.get(output.id)
        if one is None or one.replica is not replica:
            return  # aborted here a moment ago, or given to another replica
        if isinstance(output, Admitted):
            one.stream.notify(output)
            return
        if is_terminal(output):
            one.unassign()
            if replica.leaving and not one.started and _is_declined(output):
                self.dispatch([one])
                return
            del self._in_flight[output.id]
        elif not one.started:
            one.start()
        one.stream.put(output)

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests here and in their engines. Those that have ended are passed over."""
        by_replica: dict[int, list[int]] = {}
        for id in ids:
            one = self._in_flight.pop(id, None)
            if one is None:
                continue
            aborted = Tokens(id=id, tokens=[], finish="abort")
            one.stream.put(Failed(id=id, code=503, message=_ABORTED) if one.stream.pools else aborted)
            if one.replica is not None:
                by_replica.setdefault(one.replica.number, []).append(id)
            one.unassign()
        for number, aborted_ids in by_replica.items():
            self.notify(number, Abort(ids=aborted_ids))

    def reassign(self, replica: Replica) -> None:
        """Give the requests of a lost replica to others. What it had started fails: the state is lost."""
        orphans = [one for one in self._in_flight.values() if one.replica is replica]
        for one in orphans:
            one.unassign()
        started = [one for one in orphans if one.started]
        for one in started:
            self._fail(one, 503, _HALF_DONE)
        if orphans:
            moved = len(orphans) - len(started)
            _log.warning("of its requests, %d had begun and failed, %d go to others", len(started), moved)
        self.dispatch([one for one in orphans if not one.started])

    def close(self, reason: str) -> None:
        """Fail all requests in flight, and all that come later."""
        self._closed = reason
        for one in list(self._in_flight.values()):
            self._fail(one, 503, reason)

    def notify(self, number: int, request: Request) -> None:
        """Send a request that has no answer. An engine that cannot be reached does not need it either."""
        with suppress(Unreachable):
            self._send(number, request)

    def _send_batch(self, number: int, requests: list[InFlight], without: frozenset[int]) -> None:
        adds = [one.add for one in requests]
        try:
            self._send(number, AddMany(adds) if requests[0].stream.pools or len(adds) > 1 else adds[0])
        except RequestTooLarge as error:
            for one in requests:
                self._fail(one, 400, str(error))
        except Unreachable as error:
            _log.warning("replica %d: %s", number, error)
            for one in requests:
                one.unassign()
            self.dispatch(requests, without | {number})

    def _fail(self, one: InFlight, code: int, message: str) -> None:
        self._in_flight.pop(one.id, None)
        one.unassign()
        one.stream.put(Failed(id=one.id, code=code, message=message))


def _is_declined(output: Tokens | Pooled | Failed) -> bool:
    """Whether an engine that ends did not begin the request: it came too late, or time ran out."""
    if isinstance(output, Tokens):
        return output.finish == "abort" and not output.tokens
    return isinstance(output, Failed) and output.code == 503


def _frame_ends(requests: Sequence[InFlight]) -> Iterator[int]:
    """The index at which each frame ends. A single request may be larger than the limit for several."""
    tokens = 0
    for index, one in enumerate(requests):
        length = len(one.add.tokens)
        if tokens and tokens + length > _TOKENS_IN_FRAME:
            yield index
            tokens = 0
        tokens += length
    yield len(requests)
