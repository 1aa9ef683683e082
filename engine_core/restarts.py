"""Keeps processes running: one that ends is started again, at once or after a pause, within a budget."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from engine_core.engine_children import EngineProcess, EngineProcesses
from engine_core.stalls import watch
from worker.child import BROKE, CANNOT_START, LEFT_ALONE, STOPPED, Child, describe_exit
from worker.host.machine import kills_for_memory

PAUSES = (0.0, 0.5, 2.0, 4.0, 8.0)
"""Seconds before each restart of a process within WINDOW: the first is at once, since a process that has
worked for long is missed from this moment on. After the last, the process is given up, unless it ends for
want of memory."""
LONGEST_PAUSE = 60.0
"""The most seconds before a restart of a process that ends for want of memory: pauses double up to here."""
WINDOW = 600.0
"""Seconds after which an end does not count any more."""

TOGETHER_SECONDS = 3.0
"""Seconds for engines to end by themselves when one has broken with which they share experts."""
LEAVING_SECONDS = 30.0
"""The same if that one was asked to end, and the others may still send their last answers."""

_log = logging.getLogger(__name__)


class RestartBudget:
    """The ends of one process in the last WINDOW seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: list[tuple[float, bool]] = []
        """When each was, and whether memory had run out."""

    def spend(self, *, by_memory: bool = False) -> float | None:
        """Counts an end; returns the seconds to wait before the restart, or None if there shall be none.

        `by_memory`: the system has killed the process because memory ran out, which may change. Such ends
        make pauses longer, but nothing is given up because of them.
        """
        now = self._clock()
        self._ends = [(at, memory) for at, memory in self._ends if now - at < WINDOW]
        self._ends.append((now, by_memory))
        if sum(not memory for _, memory in self._ends) > len(PAUSES):
            return None
        further = len(self._ends) - len(PAUSES)
        return PAUSES[further - 1] if further <= 0 else min(LONGEST_PAUSE, PAUSES[-1] * 2**further)


class Startable(Protocol):
    """A process that can be started again and again."""

    name: str
    process: Child

    def start(self) -> None: ...


class Restarter:
    """Follows a process that runs, and those that it starts in its place."""

    def __init__(
        self,
        kept: Startable,
        *,
        may_return: Callable[[int], bool],
        on_exit: Callable[[int], None] = lambda code: None,
        on_change: Callable[[], None] = lambda: None,
        next_exit: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`may_return` tells by an exit code whether another start makes sense; `on_exit` is called first.

        `on_change` is called when `runs` or `given_up` may have changed. `next_exit` waits for the end of
        several processes that end as one.
        """
        self.runs = True
        """Whether there is a process now. Between two, while a pause lasts, there is none."""
        self.given_up = False
        """Whether no other process is started, because the budget is spent."""
        self._kept = kept
        self._may_return = may_return
        self._on_exit = on_exit
        self._on_change = on_change
        self._next_exit = next_exit or (lambda: exit_of(kept.process))
        self._budget = RestartBudget()
        self._kills = kills_for_memory()

    async def keep_running(self) -> tuple[int, str]:
        """Returns the exit code when it is not started again, and why.

        If another start would make no sense, that is why this process has killed it, or "" if it has not.
        """
        while True:
            code = await self._next_exit()
            self._on_exit(code)
            if not self._may_return(code):
                self._note(runs=False)
                why = self._kept.process.killed_because
                return code, f"{self._kept.name} has ended: {why}" if why else ""
            how = self._kept.process.killed_because or describe_exit(code)
            if by_memory := self._ended_by_memory(code):
                how = "memory ran out, and the system has killed it or a worker of it"
            if not await self._restart(how, by_memory=by_memory):
                times = f"{len(PAUSES) + 1} times in {WINDOW / 60:g} minutes"
                return code, f"{self._kept.name} ended {times}, at last so: {how}"

    def _ended_by_memory(self, code: int) -> bool:
        """Whether the system has killed processes for want of memory since the last end."""
        before, self._kills = self._kills, kills_for_memory()
        ours = self._kept.process.killed_because or code not in (-signal.SIGKILL, BROKE)
        return self._kills > before and not ours

    async def _restart(self, how: str, *, by_memory: bool) -> bool:
        """Starts the process that has ended so; returns False if it is given up instead."""
        while True:
            pause = self._budget.spend(by_memory=by_memory)
            if pause is None:
                self._note(runs=False, given_up=True)
                _log.error("%s has ended: %s; it is given up", self._kept.name, how)
                return False
            when = f" in {pause:g} s" if pause else ""
            _log.error("%s has ended: %s; it is started again%s", self._kept.name, how, when)
            if pause:
                self._note(runs=False)
                await asyncio.sleep(pause)
            try:
                self._kept.start()
            except OSError as error:  # there is no memory, or too many processes
                by_memory = error.errno == errno.ENOMEM
                how = f"it cannot be started: {error.strerror}"
                continue
            self._note(runs=True)
            return True

    def _note(self, *, runs: bool, given_up: bool = False) -> None:
        self.runs, self.given_up = runs, given_up
        self._on_change()


class EngineWatcher(Protocol):
    """Whoever has to know of the ends of engines: an `EngineClient`, or a way to one in another process."""

    def engine_exited(self, number: int, code: int) -> None: ...

    def engine_given_up(self, number: int, reason: str, *, explained: bool) -> None: ...

    def engine_stalled(self, number: int, stalled: bool) -> None: ...


class NoWatcher:
    """The watcher of engines whose clients are on other machines, and see connections end."""

    def engine_exited(self, number: int, code: int) -> None:
        pass

    def engine_given_up(self, number: int, reason: str, *, explained: bool) -> None:
        pass

    def engine_stalled(self, number: int, stalled: bool) -> None:
        pass


async def keep_engines(engines: EngineProcesses, watcher: EngineWatcher) -> None:
    """Follows every engine of this machine until none is left to start again.

    One that makes no progress is killed, and the watcher is told before.
    """
    watching = asyncio.create_task(
        watch(
            engines.engines,
            lambda engine, stalled: watcher.engine_stalled(engine.number, stalled),
            leaving=lambda: engines.leaving,
            start_seconds=engines.start_seconds,
        )
    )
    try:
        if engines.together:
            await _keep_together(engines, watcher)
        else:
            await asyncio.gather(*(_keep_engine(engines, one, watcher) for one in engines.engines))
    finally:
        watching.cancel()


async def _keep_engine(engines: EngineProcesses, engine: EngineProcess, watcher: EngineWatcher) -> None:
    restarter = Restarter(
        engine,
        may_return=lambda code: engines.may_return(engine, code),
        on_exit=lambda code: watcher.engine_exited(engine.number, code),
    )
    code, reason = await restarter.keep_running()
    watcher.engine_given_up(engine.number, reason, explained=not reason and code in (BROKE, CANNOT_START))


async def _keep_together(engines: EngineProcesses, watcher: EngineWatcher) -> None:
    group = _EngineGroup(engines, watcher)
    restarter = Restarter(
        group, may_return=lambda code: engines.may_return(group.first, code), next_exit=group.next_end
    )
    code, reason = await restarter.keep_running()
    explained = not reason and code in (BROKE, CANNOT_START)
    for engine in sorted(engines.engines, key=lambda engine: engine is group.first):
        watcher.engine_given_up(engine.number, reason, explained=explained)  # the last reason counts


class _EngineGroup:
    """Engines that share experts: if one ends, all do, and all are started again as one."""

    name = "the group of engines that share experts"

    def __init__(self, engines: EngineProcesses, watcher: EngineWatcher) -> None:
        self.first = engines.engines[0]
        self.process = self.first.process
        self._engines = engines
        self._watcher = watcher

    def start(self) -> None:
        self._engines.start_all()

    async def next_end(self) -> int:
        """Waits until all have ended, not to start anew for an operator; returns the first exit code."""
        while True:
            code = await self._end_of_all()
            has_left = code == STOPPED and self._engines.follow_the_first
            if self._engines.leaving or not has_left:
                return code
            try:
                self.start()
            except OSError:
                return BROKE

    async def _end_of_all(self) -> int:
        """Waits until one has ended, and has the others end; returns the exit code of the first."""
        exits = {asyncio.create_task(exit_of(each.process)): each for each in self._engines.engines}
        try:
            ended, others = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
            while others and all(task.result() == LEFT_ALONE for task in ended):  # by which, is not seen yet
                later, others = await asyncio.wait(
                    others, timeout=TOGETHER_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                ended |= later
                if not later:
                    break
            chosen = min(ended, key=lambda task: (task.result() == LEFT_ALONE, task.result() >= 0))
            self.first, code = exits[chosen], _told(chosen.result())
            self.process = self.first.process
            if others and code != STOPPED:
                _log.error("%s has ended: the engines that share experts with it end, too", self.first.name)
            self._watcher.engine_exited(self.first.number, code)
            if others:
                patience = LEAVING_SECONDS if code == STOPPED else TOGETHER_SECONDS
                ended, late = await asyncio.wait(others, timeout=patience)
                for task in late:
                    exits[task].process.kill()
                if late:
                    await asyncio.wait(late)
            for task in exits.keys() - {chosen}:
                own = _told(task.result())  # a signal of this process says nothing of the engine
                self._watcher.engine_exited(exits[task].number, own if own >= 0 else BROKE)
        finally:
            for task in exits:
                task.cancel()
        return code


def _told(code: int) -> int:
    """An exit code as whoever waits for the engine knows it."""
    return BROKE if code == LEFT_ALONE else code


async def exit_of(process: Child) -> int:
    """Waits for a child process to end, without a thread; returns its exit code."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)
    return process.wait()
