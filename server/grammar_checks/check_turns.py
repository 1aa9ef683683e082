"""Turns at the one process that checks grammars: owners by turns, and the questions of each in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.errors import TooManyRequests

MOST_WAITING = 64
"""The most grammars of one owner that wait for their check."""
MOST_SECONDS = 1.5
"""The seconds for which a grammar waits for its check at most."""

_BUSY = "The server is reading as many grammars of yours as it can. Try again later."


class CheckTurns:
    def __init__(self) -> None:
        self._is_taken = False
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        """Who waits, by owner; the owner whose turn is next comes first."""

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn of this owner. Raises TooManyRequests if too many wait before it, or too long."""
        if self._is_taken:
            await self._wait(owner)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: str) -> None:
        queue = self._queues.setdefault(owner, deque())
        if len(queue) >= MOST_WAITING:
            raise TooManyRequests(_BUSY, retry_after=1)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            async with asyncio.timeout(MOST_SECONDS):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self._pass_on()  # its turn had come
            else:
                self._leave(owner, place)
            if isinstance(error, TimeoutError):
                raise TooManyRequests(_BUSY, retry_after=1) from None
            raise

    def _leave(self, owner: str, place: asyncio.Future[None]) -> None:
        if (queue := self._queues.get(owner)) is not None and place in queue:
            queue.remove(place)
            if not queue:
                del self._queues[owner]

    def _pass_on(self) -> None:
        """Give the turn to the next owner, which then comes behind the others."""
        self._is_taken = False
        for owner, queue in list(self._queues.items()):
            del self._queues[owner]
            place = queue.popleft()
            if queue:
                self._queues[owner] = queue
            if not place.done():
                self._is_taken = True
                place.set_result(None)
                return
