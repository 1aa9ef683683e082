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
from server.batches.folder import KEPT_SECONDS, Folder, read_record
from server.batches.records import ENDED, BatchFiles, BatchRecord, state_of
from server.batches.responses import KeptResponse, KeptResponses, ResponseRun, forget_marks

LOOK_SECONDS = 1.0
"""Seconds between two looks for work that came through other processes, and for the lock."""
CLEAN_SECONDS = 60.0
AGAIN_SECONDS = 10.0
"""Seconds after which work is taken up again that an error has stopped."""
MOST_BATCHES, MOST_RESPONSES = 16, 256
"""Batches, and responses, that are worked on at a time. The lines of all take turns."""

_log = logging.getLogger(__name__)


class Job(Protocol):
    """A batch or a response while it is worked on."""

    id: str
    owner: str
    at: float
    """When it came."""

    @property
    def ended(self) -> bool: ...

    def look(self) -> None:
        """End early if the client, or the time, says so."""
        ...

    async def run(self) -> None:
        """Works until it has ended. Whatever stops that, it can be done again."""
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
        self.uploads = 0
        """Files that are sent to this process at this moment."""
        self._calls, self._most_lines = calls, most_lines
        self._places = asyncio.Semaphore(1)
        self._lock: int | None = None
        self._wake = asyncio.Event()
        self._running: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._ended: dict[str, float] = {}
        """Batches that have ended, and when they are forgotten."""
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
                        _log.warning("--batch-dir cannot be used until this is over: %s", error.strerror)
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
        is_due = time.monotonic() - self._counted >= CLEAN_SECONDS
        if is_due:  # in each process: they all keep responses
            self._counted = time.monotonic()
            await asyncio.to_thread(self.kept.refresh)
        if self._lock is None:
            self._lock = self.folder.lock()  # not in a thread, which could get it after this was cancelled
            if self._lock is None:
                return
        if is_due:
            await asyncio.to_thread(self._clean)
        for find, most in ((self._find_batches, MOST_BATCHES), (self._find_responses, MOST_RESPONSES)):
            self._begin(await asyncio.to_thread(find), most)
        for job, _ in self._running.values():
            job.look()

    def _begin(self, waiting: Sequence[Job], most: int) -> None:
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

    def _find_batches(self) -> list[BatchRun]:
        """The batches that have not ended, and that nobody works on."""
        found: list[BatchRun] = []
        for path in self.folder.batches.glob("*.json"):
            name = path.stem
            if name in self._running or name in self._ended:
                continue
            files = BatchFiles(self.folder, name)
            record, state = read_record(path, BatchRecord), state_of(files)
            if record is not None and state.status in ENDED:
                files.forget_input()  # it may have been killed before
                self._ended[name] = max(state.times.values(), default=record.at) + KEPT_SECONDS
            elif record is not None:
                found.append(BatchRun(self.folder, record, self._calls, self._places))
        return found

    def _find_responses(self) -> list[ResponseRun]:
        """The responses that are to be computed, and that nobody works on."""
        found: list[ResponseRun] = []
        for place in self.kept.queued():
            record = None if place.stem in self._running else read_record(place, KeptResponse)
            if record is not None and not record.waits:
                forget_marks(place)  # the process was killed before it did so
            elif record is not None:
                found.append(ResponseRun(record, place, self.kept, self._calls, self._places))
        return found

    def _clean(self) -> None:
        self.folder.clean()
        self.kept.clean()
        for id in [id for id, forgotten in self._ended.items() if forgotten <= time.time()]:
            BatchFiles(self.folder, id).remove()
            del self._ended[id]

    async def _work(self, job: Job) -> None:
        """Works on one job until it has ended, however often that fails."""
        try:
            while not job.ended:
                try:
                    await job.run()
                except OSError as error:  # such as a full disk
                    _log.warning("%s is taken up again in %g s: %s", job.id, AGAIN_SECONDS, error.strerror)
                    await asyncio.sleep(AGAIN_SECONDS)
                except Exception:
                    _log.exception("%s is taken up again soon", job.id)
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            del self._running[job.id]
            self._wake.set()
