"""Threads that compute for clients' grammars in turns of owners, while steps go on.

llguidance cannot be stopped half-way. Work that takes longer than it may is left alone: its thread runs on
with what no other thread of the machine wants, another one takes its place, and its owner is known by it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from llguidance import LLExecutor

T = TypeVar("T")

MOST_ABANDONED = 8
"""With so many threads left alone, they count among those that there may be."""
MOST_ABANDONED_BY_OWNER = 2
"""With so many of one owner, nothing new is computed for it until one of them ends."""

_IDLE_SECONDS = 10.0
"""A thread that has had nothing to do for so long ends."""


class GrammarJob(Generic[T]):
    """One piece of work."""

    def __init__(self, owner: str, work: Callable[[GrammarJob[T], LLExecutor], T]) -> None:
        self.owner = owner
        self.work = work
        self.result: T | None = None
        self.error: BaseException | None = None
        self.started: float | None = None
        """When its own computing began; None while it waits."""
        self.seconds = 0.0
        """How long it took, once it is done."""
        self.rings = False
        """Whether somebody has to be told when it is done."""
        self.abandoned = False
        self.thread: GrammarThread | None = None
        self._done = threading.Event()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is done, for so long at most; returns whether it is."""
        return self._done.wait(seconds)

    def outcome(self) -> T:
        """Returns what the job has computed, or raises the error that it met. Call this when it is done."""
        if self.error is not None:
            raise self.error
        return self.result  # pyright: ignore[reportReturnType]

    def run_for(self, now: float) -> float:
        """The seconds for which it has been computing."""
        return 0.0 if self.started is None else now - self.started

    def run(self, executor: LLExecutor) -> None:
        self.started = time.monotonic()
        try:
            self.result = self.work(self, executor)
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - self.started

    def finish(self) -> None:
        self._done.set()


class GrammarThreads:
    """Runs jobs: those of each owner in order, a few at a time, and owners by turns."""

    def __init__(
        self, most: int, most_by_owner: int, on_done: Callable[[], None], patience: float = 0.0
    ) -> None:
        """`on_done` is called from a thread when a job is done of which somebody has to be told.

        `patience`: the seconds for which one who needs a job at once waits for it at most.
        """
        self.patience = patience
        self._most = most
        self._most_by_owner = most_by_owner
        self._on_done = on_done
        self._changed = threading.Condition()
        self._queues: dict[str, deque[GrammarJob[object]]] = {}
        """The jobs that wait, by owner; the owner whose turn is next comes first."""
        self._busy: dict[str, int] = {}
        """The number of jobs that run, by owner."""
        self._abandoned: dict[str, int] = {}
        """The number of jobs that were left alone and run on, by owner."""
        self._threads = self._idle = 0
        self._stopped = False

    def submit(self, owner: str, work: Callable[[GrammarJob[T], LLExecutor], T]) -> GrammarJob[T]:
        job = GrammarJob(owner, work)
        with self._changed:
            self._queues.setdefault(owner, deque()).append(job)  # pyright: ignore[reportArgumentType]
            if self._idle >= sum(map(len, self._queues.values())):
                self._changed.notify()
            elif self._threads + max(0, sum(self._abandoned.values()) - MOST_ABANDONED) < self._most:
                self._threads += 1
                GrammarThread(self).start()
        return job

    def refuses(self, owner: str) -> bool:
        """Whether too much of an owner was left alone and still runs."""
        return self._abandoned.get(owner, 0) >= MOST_ABANDONED_BY_OWNER

    def abandon(self, job: GrammarJob[T]) -> None:
        """Let a job go that nobody waits for any more: it is not begun, or its thread is left alone."""
        with self._changed:
            queue = self._queues.get(job.owner)
            if queue is not None and job in queue:
                queue.remove(job)  # pyright: ignore[reportArgumentType]
                if not queue:
                    del self._queues[job.owner]
            if job.thread is None or job.done() or job.abandoned:
                return
            job.abandoned = True
            self._abandoned[job.owner] = self._abandoned.get(job.owner, 0) + 1
            _count_down(self._busy, job.owner)
            self._threads -= 1
            if self._queues and self._threads < self._most:
                self._threads += 1
                GrammarThread(self).start()
        job.thread.yield_to_others()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._queues.clear()
            self._changed.notify_all()

    def next_job(self, thread: GrammarThread) -> GrammarJob[object] | None:
        """Wait for the job that this thread runs next; None: there will be none."""
        with self._changed:
            while not self._stopped:
                for owner, queue in self._queues.items():
                    if self._busy.get(owner, 0) < self._most_by_owner:
                        job = queue.popleft()
                        del self._queues[owner]
                        if queue:
                            self._queues[owner] = queue  # behind the others
                        self._busy[owner] = self._busy.get(owner, 0) + 1
                        job.thread = thread
                        return job
                self._idle += 1
                woken = self._changed.wait(_IDLE_SECONDS)
                self._idle -= 1
                if not woken and not self._queues:
                    break
            self._threads -= 1
            return None

    def end(self, job: GrammarJob[object]) -> bool:
        """Note that a job is done; returns whether its thread shall go on."""
        with self._changed:
            job.finish()
            if job.abandoned:
                _count_down(self._abandoned, job.owner)
                return False
            _count_down(self._busy, job.owner)
            if job.owner in self._queues:
                self._changed.notify()  # this thread may take another owner's
        if job.rings:
            self._on_done()
        return True


class GrammarThread(threading.Thread):
    """One of the threads, with an executor through which llguidance lets go of the interpreter's lock."""

    _numbers = iter(range(1 << 62))

    def __init__(self, threads: GrammarThreads) -> None:
        super().__init__(name="grammars", daemon=True)  # one that never ends must not keep the process
        self._threads = threads
        self._label = f"grammar-{next(self._numbers)}"[:15]

    def run(self) -> None:
        # The executor's thread takes over the name, by which both are found.
        with suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self._label)
        executor = LLExecutor(1)
        while (job := self._threads.next_job(self)) is not None:
            job.run(executor)
            if not self._threads.end(job):
                return

    def yield_to_others(self) -> None:
        """Let it and its executor run only where no other thread wants to."""
        with suppress(OSError, AttributeError):
            for task in os.listdir("/proc/self/task"):
                if Path(f"/proc/self/task/{task}/comm").read_text().strip() == self._label:
                    os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))


def _count_down(counts: dict[str, int], owner: str) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
