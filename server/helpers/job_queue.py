"""Has orders followed by helper processes: a queue for each job, in which owners take turns.

A process that ends at an order, or is killed because it is late, takes that order alone along: it is started
again for those that wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from server.errors import ApiError, Overloaded, TooManyRequests, Unavailable
from server.helpers.job import Ended, Job
from server.helpers.messages import SentError, received_error, sent_error, to_msgpack
from server.helpers.process import Data, HelperProcess

A = TypeVar("A")
T = TypeVar("T")

_log = logging.getLogger(__name__)


def begin_task(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Begin a task that `tasks` holds until it has ended: an event loop holds none."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class Helpers:
    """The queues and processes of all jobs that one frontend has."""

    def __init__(self, log_style: str = "info") -> None:
        self._log_style = log_style
        self._queues: list[JobQueue[Any]] = []

    def open(self, job: Job[A], setup: Callable[[], msgspec.Struct]) -> JobQueue[A]:
        """Makes a queue with processes of its own. `setup` makes what the job is opened with in each."""
        queue = JobQueue(job, setup, self._log_style)
        self._queues.append(queue)
        return queue

    def close(self) -> None:
        """Ends all processes, and what they do. It may be called where the event loop has ended."""
        for queue in self._queues:
            queue.close()


class _Order(Generic[A]):
    """An order of one request, or of several that ask the same."""

    task: asyncio.Task[A | SentError]
    askers = 0
    begun = False


class JobQueue(Generic[A]):
    """The orders of one job, and its processes, which are started with the first of them."""

    def __init__(self, job: Job[A], setup: Callable[[], msgspec.Struct], log_style: str) -> None:
        self.job = job
        self.processes = [HelperProcess(job, setup, log_style) for _ in range(job.processes)]
        self._idle = self.processes[::-1]
        """The processes without an order. The one used last is taken first, so that few are started."""
        self._waiting: dict[str, deque[asyncio.Future[HelperProcess]]] = {}
        """The places of those who wait for a process, by owner; the owner whose turn is next comes first."""
        self._by_digest: dict[bytes, _Order[A]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.bytes = 0
        """Bytes of all orders that wait or are followed."""

    async def ask(
        self, order: msgspec.Struct, data: Data = b"", *, owner: str = "", digest: bytes = b""
    ) -> A:
        """Has an order about some bytes followed. Raises the error with which the request ends.

        Orders with the same digest are followed once. What a process has begun it ends, although its client
        leaves: to start the process again would cost more.
        """
        asked = self._by_digest.get(digest) or self._add(order, data, owner, digest)
        asked.askers += 1
        try:
            found = await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.task.cancelled():  # and not who asks
                raise self._gone() from None
            raise
        finally:
            asked.askers -= 1
            if not asked.askers and not asked.begun:
                self._forget(asked, digest)
                asked.task.cancel()
        if isinstance(found, SentError):
            raise received_error(found)
        return found

    def start(self) -> None:
        """Starts a process before the first order, which else waits for that."""
        if self._idle:
            begin_task(self._start(self._idle.pop()), self._tasks)

    def close(self) -> None:
        if any(task.get_loop().is_closed() for task in self._tasks):
            self._idle = self.processes
        else:
            for task in self._tasks:
                task.cancel()  # which kills its process
        for process in self._idle:
            process.kill()

    def _add(self, order: msgspec.Struct, data: Data, owner: str, digest: bytes) -> _Order[A]:
        sent = to_msgpack(order), data
        name, size = self.job.name, sum(map(len, sent))
        if self.bytes and self.bytes + size > self.job.waiting_bytes:
            less = "Try again later, or send less in one request."
            raise Overloaded(f"The server is reading as many {name} as it can. {less}", retry_after=1)

        def end(_: object) -> None:
            self.bytes -= size
            self._forget(asked, digest)

        self.bytes += size
        asked = _Order[A]()
        asked.task = begin_task(self._follow(asked, order, sent, owner), self._tasks)
        asked.task.add_done_callback(end)
        if digest:
            self._by_digest[digest] = asked
        return asked

    def _forget(self, asked: _Order[A], digest: bytes) -> None:
        if self._by_digest.get(digest) is asked:
            del self._by_digest[digest]

    async def _follow(
        self, asked: _Order[A], order: msgspec.Struct, sent: tuple[bytes, Data], owner: str
    ) -> A | SentError:
        try:
            process = await self._turn(owner)
        except TooManyRequests as error:
            return sent_error(error)
        asked.begun = runs = True
        try:
            found = await process.ask(*sent)
            return msgspec.msgpack.decode(found, type=self.job.answer | SentError)
        except ApiError as error:
            return sent_error(error)
        except Ended as ended:
            runs, size = False, sum(map(len, sent))
            _log.warning("one of the %s, of %d bytes, was given up: %s", self.job.name, size, ended)
            return sent_error(self.job.explain(order, ended) or self._gone())
        finally:
            if runs:
                self._pass_on(process)
            else:
                begin_task(self._start(process), self._tasks)

    async def _start(self, process: HelperProcess) -> None:
        """Starts a process, and then gives it to who waits."""
        try:
            with suppress(ApiError):
                await process.start()
        finally:
            self._pass_on(process)

    async def _turn(self, owner: str) -> HelperProcess:
        """Waits for a process. Raises TooManyRequests if too many of this owner wait, or one for too long."""
        if self._idle:
            return self._idle.pop()
        places = self._waiting.setdefault(owner, deque())
        most = self.job.owner_waiting
        if most is not None and sum(not place.done() for place in places) >= most:
            raise self._busy()
        place: asyncio.Future[HelperProcess] = asyncio.get_running_loop().create_future()
        places.append(place)
        try:
            async with asyncio.timeout(self.job.waiting_seconds):
                return await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # its turn has just come
                self._pass_on(place.result())
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise

    def _pass_on(self, process: HelperProcess) -> None:
        """Gives a process to the owner whose turn it is, who then comes behind the others."""
        for owner, places in list(self._waiting.items()):
            del self._waiting[owner]
            while places:
                place = places.popleft()
                if not place.done():
                    if places:
                        self._waiting[owner] = places
                    return place.set_result(process)
        self._idle.append(process)

    def _busy(self) -> TooManyRequests:
        most = f"as many {self.job.name} of yours as it can"
        return TooManyRequests(f"The server is reading {most}. Try again later.", retry_after=1)

    def _gone(self) -> Unavailable:
        ended = f"The process that reads {self.job.name} ended."
        return Unavailable(f"{ended} Send this request again.", retry_after=1)
