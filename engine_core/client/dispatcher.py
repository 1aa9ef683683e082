"""Which engine has which request, from its submission to its last answer. Reads no socket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from engine_core.client.in_flight import Order
from engine_core.client.replica import Replica
from engine_core.client.replica_table import Roster
from engine_core.client.streams import is_terminal
from engine_core.protocol import Abort, AddMany, Failed, Pooled, Request, Tokens
from engine_core.wire.transport import RequestTooLarge, Unreachable

_TOKENS_IN_FRAME = 1 << 17
"""Of several requests together: the engine begins with the first of them while the others are written."""

_ABORTED = "the request was ended before it was done"
_HALF_DONE = "the replica that was generating this answer has ended: send the request again"
_NO_REPLICA = "no engine can take requests now"

_log = logging.getLogger(__name__)


class Dispatch:
    """Each order gets exactly one terminal answer, whatever becomes of the engines."""

    def __init__(self, roster: Roster, send: Callable[[int, Request], None]) -> None:
        """`send`: to the engine of that number. Raises Unreachable or RequestTooLarge."""
        self._roster = roster
        self._send = send
        self._orders: dict[int, Order] = {}
        self._closed: str | None = None

    def __len__(self) -> int:
        """Orders that are under way."""
        return len(self._orders)

    def place(self, orders: Sequence[Order], without: frozenset[int] = frozenset()) -> None:
        """Send each to the replica that is best for it; `without` are those that could not be reached."""
        batches: dict[int, list[Order]] = {}
        for order in orders:
            chosen = self._roster.choose(order, without) if self._closed is None else None
            if chosen is None:
                nobody = _NO_REPLICA if order.pin is None else f"replica {order.pin} takes no requests now"
                self._refuse(order, 503, self._closed or nobody)
            else:
                self._orders[order.id] = order
                order.place(*chosen)
                batches.setdefault(chosen[0].number, []).append(order)
        for number, batch in batches.items():
            start = 0
            for stop in _frames(batch):
                self._send_orders(number, batch[start:stop], without)
                start = stop

    def deliver(self, replica: Replica, output: Tokens | Pooled | Failed) -> None:
        order = self._orders.get(output.id)
        if order is None or order.replica is not replica:
            return  # aborted here a moment ago, or given to another replica
        if is_terminal(output):
            order.leave()
            if replica.leaving and not order.began and _is_put_off(output):
                self.place([order])
                return
            del self._orders[output.id]
        elif not order.began:
            order.begin()
        order.stream.put(output)

    def abort(self, ids: Iterable[int]) -> None:
        """End these. Those that have ended are passed over."""
        told: dict[int, list[int]] = {}
        for id in ids:
            order = self._orders.pop(id, None)
            if order is None:
                continue
            aborted = Tokens(id=id, tokens=[], finish="abort")
            order.stream.put(Failed(id=id, code=503, message=_ABORTED) if order.stream.pools else aborted)
            if order.replica is not None:
                told.setdefault(order.replica.number, []).append(id)
            order.leave()
        for number, gone in told.items():
            self.tell(number, Abort(ids=gone))

    def vacate(self, replica: Replica) -> None:
        """What it had not begun goes to others; the rest has lost its state and fails."""
        orphans = [order for order in self._orders.values() if order.replica is replica]
        for order in orphans:
            order.leave()
        begun = [order for order in orphans if order.began]
        for order in begun:
            self._refuse(order, 503, _HALF_DONE)
        if orphans:
            moved = len(orphans) - len(begun)
            _log.warning("of its requests, %d had begun and failed, %d go to others", len(begun), moved)
        self.place([order for order in orphans if not order.began])

    def close(self, reason: str) -> None:
        """What is under way fails, and so does all that comes later."""
        self._closed = reason
        for order in list(self._orders.values()):
            self._refuse(order, 503, reason)

    def tell(self, number: int, request: Request) -> None:
        """Send what needs no answer: an engine that cannot be reached has nothing to do either."""
        with suppress(Unreachable):
            self._send(number, request)

    def _send_orders(self, number: int, orders: list[Order], without: frozenset[int]) -> None:
        adds = [order.add for order in orders]
        try:
            self._send(number, AddMany(adds) if orders[0].stream.pools or len(adds) > 1 else adds[0])
        except RequestTooLarge as error:
            for order in orders:
                self._refuse(order, 400, str(error))
        except Unreachable as error:
            _log.warning("replica %d: %s", number, error)
            for order in orders:
                order.leave()
            self.place(orders, without | {number})

    def _refuse(self, order: Order, code: int, message: str) -> None:
        self._orders.pop(order.id, None)
        order.leave()
        order.stream.put(Failed(id=order.id, code=code, message=message))


def _is_put_off(output: Tokens | Pooled | Failed) -> bool:
    """By an engine that ends: the request came too late for it, or could not begin in its last seconds."""
    if isinstance(output, Tokens):
        return output.finish == "abort" and not output.tokens
    return isinstance(output, Failed) and output.code == 503


def _frames(orders: Sequence[Order]) -> Iterator[int]:
    """Where each frame ends. A single request may be larger than what several may be together."""
    tokens = 0
    for index, order in enumerate(orders):
        length = len(order.add.tokens)
        if tokens and tokens + length > _TOKENS_IN_FRAME:
            yield index
            tokens = 0
        tokens += length
    yield len(orders)
