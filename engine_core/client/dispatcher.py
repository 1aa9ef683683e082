"""The requests in flight, and the replica that has each, from submission to the last answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from engine_core import protocol
from engine_core.client.in_flight import InFlight, Stream, blame, take_back
from engine_core.client.quarantine import Quarantine
from engine_core.client.replica import Replica
from engine_core.client.replica_routing import ReplicaTable
from engine_core.reason_codes import DEADLINE, Reason
from engine_core.wire.transport import RequestTooLarge, Unreachable
from worker.calls.messages import CallFailed, NoWorkers, results_of
from worker.host.machine import kills_for_memory

_TOKENS_IN_MESSAGE = 1 << 17
"""The most tokens of several requests in one message. An engine computes one while the next is written."""
_MEDIA_IN_MESSAGE = 64 << 20
"""The most bytes of media of several requests in one message."""

_STANDING_SECONDS = 1.0
"""Seconds for an engine to say how far a request has come. One that computes a long step says it later."""

_ABORTED = "the request was ended before it was done"
_HALF_DONE = "the replica that was generating this answer has ended: send the request again"
_TOO_LATE = "the request has taken longer than it may, and no engine could take it"
_NO_REPLICA = "no engine can take requests now"
_ENDED = "an engine has ended whose workers were called"

_log = logging.getLogger(__name__)


class Dispatcher:
    """Sends requests to replicas. Each gets exactly one terminal answer, whatever becomes of the engines."""

    def __init__(
        self, table: ReplicaTable, send: Callable[[int, protocol.Request], None], restart_wait: float | None
    ) -> None:
        """`send` sends to the engine of a number, and raises Unreachable or RequestTooLarge.

        `restart_wait`: the seconds for which requests wait for an engine that is started again; None: as the
        table says.
        """
        self._table = table
        self._send = send
        self._restart_wait = restart_wait
        self._loop = asyncio.get_running_loop()
        self._quarantine = Quarantine()
        self._kills = kills_for_memory()
        """The processes that the system had killed for want of memory when an engine was lost last."""
        self._in_flight: dict[int, InFlight] = {}
        self._held: dict[int, asyncio.TimerHandle] = {}
        """The requests that no replica could take, in the order in which they came; timers refuse them."""
        self._asked: dict[int, asyncio.Future[protocol.Standing]] = {}
        """The requests of which somebody wants to know how far they have come, one at a time of each."""
        self._called: dict[int, tuple[Replica, asyncio.Future[protocol.Returned]]] = {}
        """The calls of workers that are under way."""
        self._last_call = secrets.randbits(48)  # answers to a server that crashed must not fit
        self.spelling: protocol.Spelling | None = None
        """How tokens are spelled, which an engine is told before its first request with a grammar."""
        self._closed: tuple[str, Reason] | None = None
        """Why no request is taken any more, in words and as a code for clients."""

    def __len__(self) -> int:
        return len(self._in_flight)

    def dispatch(self, requests: Sequence[InFlight], without: frozenset[int] = frozenset()) -> None:
        """Send each request to the replica that is best for it, but to none of `without`."""
        batches: dict[int, list[InFlight]] = {}
        for one in requests:
            self._in_flight[one.id] = one
            if self._quarantine.digests and self._quarantine.holds(one.add):
                self._answer(one, protocol.quarantined(one.id))
                continue
            chosen = self._table.choose(one, without) if self._closed is None else None
            if chosen is None:
                self._hold_or_refuse(one)
                continue
            replica, tokens = chosen
            batch = batches.setdefault(replica.number, [])
            if one.stream.pools and (query := self._table.late_queries.missing(one.add, replica.number)):
                batch.append(self._send_again(query, replica))
            one.assign(replica, tokens)
            batch.append(one)
        for number, batch in batches.items():
            for message in _messages(batch):
                self._send_message(number, message, without)

    def dispatch_held(self) -> None:
        """Try again what no replica could take: another one works, or one is given up."""
        held = [self._in_flight[id] for id in self._held]
        for one in held:
            self._held.pop(one.id).cancel()
            one.shorten()
        self.dispatch(held)

    def deliver(self, replica: Replica, output: protocol.Output) -> None:
        one = self._in_flight.get(output.id)
        if one is None or one.replica is not replica:
            return  # aborted here a moment ago, or given to another replica
        if isinstance(output, protocol.Tokens) and output.finish is None:
            if not one.started:
                one.start()
            one.emitted.extend(output.tokens)
            one.stream.put(output)
        elif isinstance(output, protocol.Admitted):
            one.stream.notify(output)
        elif isinstance(output, protocol.RunsAlone):
            one.runs_alone = True
        elif isinstance(output, protocol.Standing):
            if (asked := self._asked.get(output.id)) is not None and not asked.done():
                asked.set_result(output)
        else:
            self._end(one, replica, output)

    def _end(
        self, one: InFlight, replica: Replica, output: protocol.Tokens | protocol.Pooled | protocol.Failed
    ) -> None:
        """Take the last output of a request, unless another replica can go on after it."""
        moves = replica.leaving and (not one.emitted or self._table.goes_on)
        if moves and _is_declined(output):
            take_back(one)
            self.dispatch([one])
            return
        if isinstance(output, protocol.Failed):
            if output.error == protocol.QUARANTINED:
                self._quarantine.put(one.add)
            elif one.emitted and not one.started and output.code == 400:
                output = protocol.Failed(id=output.id, code=503, message=_HALF_DONE)
        self._answer(one, output)

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests, with finish "abort" or Failed. Those that have ended are passed over."""
        by_replica: dict[int, list[int]] = {}
        for id in ids:
            one = self._in_flight.get(id)
            if one is None:
                continue
            if one.replica is not None:
                by_replica.setdefault(one.replica.number, []).append(id)
            aborted = protocol.Tokens(id=id, tokens=[], finish="abort")
            self._answer(
                one, protocol.Failed(id=id, code=503, message=_ABORTED) if one.stream.pools else aborted
            )
        for number, aborted_ids in by_replica.items():
            self.notify(number, protocol.Abort(ids=aborted_ids))

    def pause(self, ids: Iterable[int], *, paused: bool) -> None:
        """Let engines compute nothing for these requests, or go on. Those that have ended are passed over."""
        by_replica: dict[int, list[int]] = {}
        for id in ids:
            one = self._in_flight.get(id)
            if one is None or one.paused is paused:
                continue
            one.paused = paused
            if one.replica is not None:
                by_replica.setdefault(one.replica.number, []).append(id)
        for number, changed in by_replica.items():
            self.notify(number, protocol.Pause(ids=changed) if paused else protocol.Resume(ids=changed))

    async def standing(self, id: int) -> protocol.Standing | None:
        """Ask its engine how far a request has come; None if no engine has it, or says so in time."""
        one = self._in_flight.get(id)
        if one is None or one.replica is None:
            return None
        answer = self._asked[id] = self._loop.create_future()
        self.notify(one.replica.number, protocol.AskStanding(id=id))
        try:
            async with asyncio.timeout(_STANDING_SECONDS):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asked.pop(id, None)

    async def call_workers(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Have every worker of every replica that works run a method -> what each has returned.

        Raises CallFailed, also if an engine ends meanwhile.
        """
        try:
            msgspec.msgpack.encode([method, args, kwargs])
        except (TypeError, ValueError, OverflowError) as error:
            raise CallFailed(f"it cannot be sent: {error}") from None
        called: list[asyncio.Future[protocol.Returned]] = []
        for replica in [one for one in self._table.replicas.values() if one.works]:
            self._last_call += 1
            called.append(self._loop.create_future())
            self._called[self._last_call] = replica, called[-1]
            self.notify(replica.number, protocol.CallWorkers(self._last_call, method, args, kwargs))
        if not called:
            raise NoWorkers(_NO_REPLICA)
        returned = await asyncio.gather(*called)
        return results_of([each for one in returned for each in one.returns])

    def deliver_returned(self, returned: protocol.Returned) -> None:
        _, future = self._called.pop(returned.id, (None, None))
        if future is not None and not future.done():
            future.set_result(returned)

    def _fail_calls(self, replica: Replica) -> None:
        """End the calls of workers of an engine that has ended."""
        for id, (one, future) in list(self._called.items()):
            if one is replica:
                del self._called[id]
                if not future.done():
                    future.set_exception(NoWorkers(_ENDED))

    def hand_over(self, replica: Replica, ready: protocol.Ready | None) -> None:
        """Give the requests of a lost replica to others, those that had begun first.

        `ready` is what the replica had said of itself, or None if no request can be what ended it.
        """
        self._fail_calls(replica)
        kills, self._kills = self._kills, kills_for_memory()
        orphans = [one for one in self._in_flight.values() if one.replica is replica]
        guilty = blame(orphans, ready) if ready is not None else None
        for one in orphans:
            take_back(one)
        if guilty is not None:
            orphans.remove(guilty)
            if self._kills > kills:  # it may fit when others need less, so it may be sent again
                self._answer(guilty, protocol.lacks_memory(guilty.id))
            else:
                self._quarantine.put(guilty.add)
                self._answer(guilty, protocol.quarantined(guilty.id))
        # Those that run alone run first, and the one that got nowhere at all is the likeliest to be found.
        orphans.sort(key=lambda one: (not one.add.alone, len(one.emitted) * one.add.alone, not one.emitted))
        if orphans:
            begun = sum(bool(one.emitted) for one in orphans)
            _log.warning("of its %d requests, which others take over, %d had begun", len(orphans), begun)
        self.dispatch(orphans)

    def close(self, reason: str, code: Reason) -> None:
        self._closed = reason, code
        self._refuse(list(self._in_flight.values()))
        for replica in self._table.replicas.values():
            self._fail_calls(replica)

    def notify(self, number: int, request: protocol.Request) -> None:
        """Send a request that has no answer. An engine that cannot be reached does not need it either."""
        with suppress(Unreachable):
            self._send(number, request)

    def _send_message(self, number: int, requests: Sequence[InFlight], without: frozenset[int]) -> None:
        adds = [one.add for one in requests]
        try:
            if self.spelling is not None and any(add.grammar is not None for add in adds):
                self._spell(number, self.spelling)
            self._send(
                number, protocol.AddRequests(adds) if requests[0].stream.pools or len(adds) > 1 else adds[0]
            )
            if paused := [one.id for one in requests if one.paused]:
                self.notify(number, protocol.Pause(ids=paused))
        except RequestTooLarge as error:
            for one in requests:
                self._fail(one, 400, str(error))
        except (TypeError, ValueError, OverflowError) as error:  # programs may give any number
            for one in requests:
                self._fail(one, 400, f"the request cannot be sent: {error}")
        except Unreachable as error:
            _log.warning("replica %d: %s", number, error)
            for one in requests:
                one.unassign()
            self.dispatch(requests, without | {number})

    def _spell(self, number: int, spelling: protocol.Spelling) -> None:
        """Tell an engine how tokens are spelled, unless this process of it knows."""
        replica = self._table.replicas[number]
        if not replica.spelled:
            self._send(number, spelling)
            replica.spelled = True

    def _send_again(self, query: protocol.AddRequest, replica: Replica) -> InFlight:
        """A late-interaction query whose vectors are lost, and needed. Nobody waits for the answer."""
        one = InFlight(query, Stream[protocol.Pooled](query.id, self._loop, pools=True))
        self._in_flight[query.id] = one
        one.assign(replica, len(query.tokens))
        return one

    def _hold_or_refuse(self, one: InFlight) -> None:
        """Keep a request for a while, if a replica may be able to take it later.

        One that has been held since it was last sent keeps its deadline.
        """
        wait = self._table.restart_wait if self._restart_wait is None else self._restart_wait
        if self._closed is not None or wait <= 0 or not self._table.may_take(one):
            self._refuse([one])
            return
        if one.deadline is None:
            seconds = min(wait, one.seconds_left) if one.since else wait
            one.deadline = self._loop.time() + seconds
        self._held[one.id] = self._loop.call_at(one.deadline, self._refuse, [one])

    def _refuse(self, requests: list[InFlight]) -> None:
        for one in requests:
            nobody = _NO_REPLICA if one.pin is None else f"replica {one.pin} takes no requests now"
            message, error = self._closed or (_HALF_DONE if one.emitted else nobody, "")
            late = not error and one.since > 0 and one.seconds_left <= 0
            if late:
                self._fail(one, 504 if one.emitted else 503, _TOO_LATE, DEADLINE)
            else:
                self._fail(one, 503, message, error)

    def _fail(self, one: InFlight, code: int, message: str, error: str = "") -> None:
        self._answer(one, protocol.Failed(id=one.id, code=code, message=message, error=error))

    def _answer(self, one: InFlight, last: protocol.Tokens | protocol.Pooled | protocol.Failed) -> None:
        self._in_flight.pop(one.id, None)
        if (timer := self._held.pop(one.id, None)) is not None:
            timer.cancel()
        one.unassign()
        one.stream.put(last)


def _is_declined(output: protocol.Tokens | protocol.Pooled | protocol.Failed) -> bool:
    """Whether an engine that ends did not begin the request: it came too late, or time ran out."""
    if isinstance(output, protocol.Tokens):
        return output.finish == "abort" and not output.tokens
    return isinstance(output, protocol.Failed) and output.code == 503 and output.error != DEADLINE


def _messages(requests: Sequence[InFlight]) -> Iterator[Sequence[InFlight]]:
    """The requests of each message. A single one may be larger than the limits for several."""
    start = tokens = 0
    media: dict[bytes, int] = {}
    for index, one in enumerate(requests):
        length = len(one.add.tokens)
        own = {each.hash: len(each.pixels) for each in one.add.media}
        large = bool(own) and sum((media | own).values()) > _MEDIA_IN_MESSAGE
        if tokens and (large or tokens + length > _TOKENS_IN_MESSAGE):
            yield requests[start:index]
            start, tokens, media = index, 0, {}
        tokens += length
        media |= own
    yield requests[start:]
