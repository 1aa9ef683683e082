"""Does the work that waits, in the one API process that holds the folder's lock."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from server.batches.app_call import OwnerCalls
from server.batches.batch_run import BatchRun
from server.batches.database import Damaged
from server.batches.folder import Folder
from server.batches.records import BatchTable
from server.batches.response_run import ResponseRun
from server.batches.responses import KeptResponses

LOOK_SECONDS = 1.0
"""Seconds between two looks for work that came through other processes, and for the lock."""
CLEAN_SECONDS = 60.0
AGAIN_SECONDS = 10.0
"""Seconds after which work is taken up again that an error has stopped."""
MOST_BATCHES, MOST_RESPONSES = 16, 256
"""Batches, and responses, that are worked on at a time. The lines of all take turns."""

_log = logging.getLogger(__name__)


class BackgroundJob(Protocol):
    """A batch or a response while it is worked on."""

    id: str
    owner: str
    at: float
    """When it came."""

    ended: bool

    def look(self, *, wanted: bool) -> None:
        """End early if the time is over, or the client does not want it any more."""
        ...

    async def run(self) -> None:
        """Works until it has ended. Whatever stops that, it can be done again."""
        ...

    async def give_up(self, message: str) -> None:
        """End as failed, because data are damaged. It blocks nothing else."""
        ...


class Runner:
    """Finds work in the folder, and does it until it has ended."""

    def __init__(
        self,
        folder: Folder,
        calls: OwnerCalls,
        most_lines: Callable[[], int],
        kept: KeptResponses | None = None,
    ) -> None:
        """`most_lines` says how many lines may be under way, of all batches together."""
        self.folder = folder
        self.kept = kept or KeptResponses(folder, None)
        self.batches = BatchTable(folder)
        self.uploads = 0
        """Files that are sent to this process at this moment."""
        self._calls, self._most_lines = calls, most_lines
        self._places = asyncio.Semaphore(1)
        self._lock: int | None = None
        self._wake = asyncio.Event()
        self._running: dict[str, tuple[BackgroundJob, asyncio.Task[None]]] = {}
        self._given_up: set[str] = set()
        """Jobs that cannot even be noted as failed. They are left alone until the next start."""
        self._counted = -CLEAN_SECONDS
        self._told = False
        """Whether the log says that the folder cannot be used, which it says once."""

    def wake(self) -> None:
        """Look for work now."""
        self._wake.set()

    async def run(self) -> None:
        """Works until it is cancelled. What is under way then is computed again by who comes next."""
        self._places = asyncio.Semaphore(self._most_lines())
        try:
            while True:
                try:
                    await self._look()
                    self._told = False
                except OSError as error:  # such as a full disk
                    if not self._told:
                        _log.warning(
                            "the folder of batches cannot be used until this is over: %s", error.strerror
                        )
                    self._told = True
                except Exception:
                    _log.exception("the folder of batches cannot be used now")
                # wait_for of Python 3.11 forgets that it was cancelled if the event is set at that moment.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._lock is not None:
                os.close(self._lock)

    async def _look(self) -> None:
        if not self.folder.in_use():
            return
        is_due = time.monotonic() - self._counted >= CLEAN_SECONDS
        if is_due:  # in each process: they all keep responses
            self._counted = time.monotonic()
            await asyncio.to_thread(self.folder.used)
        if self._lock is None:
            self._lock = self.folder.lock()  # not in a thread, which could get it after this was cancelled
            if self._lock is None:
                return
        if is_due:
            await asyncio.to_thread(self._clean)
        for find, most in ((self._find_batches, MOST_BATCHES), (self._find_responses, MOST_RESPONSES)):
            wanted, new = await asyncio.to_thread(find)
            self._begin(new, most)
            for job, _ in self._running.values():
                if isinstance(job, BatchRun) == (most == MOST_BATCHES):
                    job.look(wanted=job.id in wanted)

    def _begin(self, waiting: Sequence[BackgroundJob], most: int) -> None:
        """Begin with what waits: first the work of owners of whom least is done, the oldest first."""
        if not waiting:
            return
        kind, left = type(waiting[0]), list(waiting)
        owners = Counter(job.owner for job, _ in self._running.values() if isinstance(job, kind))
        while left and owners.total() < most:
            job = min(left, key=lambda one: (owners[one.owner], one.at))
            left.remove(job)
            owners[job.owner] += 1
            self._running[job.id] = job, asyncio.create_task(self._work(job))

    def _find_batches(self) -> tuple[set[str], list[BatchRun]]:
        """The batches that are to be computed, and the jobs of those that nobody works on."""
        found = self.batches.to_do()
        wanted = {each.record.id for each in found if each.cancelled_at is None}
        return wanted, [
            BatchRun(self.folder, each, self._calls, self._places)
            for each in found
            if self._is_new(each.record.id)
        ]

    def _find_responses(self) -> tuple[set[str], list[ResponseRun]]:
        """The responses that are to be computed, and the jobs of those that nobody works on."""
        found = self.kept.to_do()
        return {str(number) for number, _, _ in found}, [
            ResponseRun(number, owner, at, self.kept, self._calls, self._places)
            for number, owner, at in found
            if self._is_new(str(number))
        ]

    def _is_new(self, id: str) -> bool:
        return id not in self._running and id not in self._given_up

    def _clean(self) -> None:
        self.kept.clean()
        self.folder.clean()

    async def _work(self, job: BackgroundJob) -> None:
        """Works on one job until it has ended, however often that fails."""
        try:
            while not job.ended:
                try:
                    await job.run()
                except Damaged as damage:
                    _log.error("%s ends as failed: %s", job.id, damage.message)
                    await self._give_up(job, damage.message)
                    return
                except OSError as error:  # such as a full disk
                    _log.warning("%s is taken up again in %g s: %s", job.id, AGAIN_SECONDS, error.strerror)
                    await asyncio.sleep(AGAIN_SECONDS)
                except Exception:
                    _log.exception("%s is taken up again soon", job.id)
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            del self._running[job.id]
            self._wake.set()

    async def _give_up(self, job: BackgroundJob, message: str) -> None:
        try:
            await job.give_up(message)
        except Exception as error:  # the database takes nothing any more
            _log.error("%s is left alone until the next start: %s", job.id, error)
            self._given_up.add(job.id)
