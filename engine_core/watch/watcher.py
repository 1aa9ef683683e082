"""Watches child processes: whoever stops making progress gets nothing new, and is killed if that lasts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from engine_core.watch import stacks
from engine_core.watch.rules import State, Watch, describe
from worker.child import Child
from worker.host.progress_page import Entry, ProgressPage

TICK_SECONDS = 0.5
DUMP_SECONDS = 0.5
"""Seconds for a process to write its stacks before it is killed."""

_log = logging.getLogger(__name__)


class Watchable(Protocol):
    """A process that writes to a page how its work goes on, and those that are started in its place."""

    name: str
    process: Child
    page: ProgressPage


Watched = TypeVar("Watched", bound=Watchable)


class Watcher:
    """Looks at processes again and again, and acts by the rules."""

    def __init__(
        self,
        watched: Sequence[Watched],
        on_change: Callable[[Watched, bool], None],
        *,
        leaving: Callable[[], bool] = lambda: False,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is told of a process with True that it has stalled, and with False that it goes on or
        that another one begins in its place. `on_look` is called at each look.
        """
        self._watched = [_Watched(one, lambda stalled, one=one: on_change(one, stalled)) for one in watched]
        self._leaving = leaving
        self._on_look = on_look

    async def run(self) -> None:
        """Looks until it is cancelled."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            before, elapsed = time.monotonic(), time.monotonic() - before
            self._on_look()
            for one in self._watched:
                one.look(elapsed, leaving=self._leaving())


class _Watched:
    """One process that is watched."""

    def __init__(self, kept: Watchable, on_change: Callable[[bool], None]) -> None:
        self._kept = kept
        self._on_change = on_change
        self._stalled = False
        self._killed = False
        self._process: Child | None = None
        self._watch = Watch()

    def look(self, elapsed: float, *, leaving: bool) -> None:
        process = self._kept.process
        if process is not self._process:  # another one, which has just been started
            self._process, self._watch, self._killed = process, Watch(), False
            self._note(stalled=False)
        entries = self._kept.page.entries()
        if self._killed or not entries[0].pid:
            return  # it ends, or it loads
        stopped = {one.pid for one in entries if stacks.is_stopped(one.pid)}
        state = self._watch.look(elapsed, entries, stopped=bool(stopped), leaving=leaving)
        if state is State.WELL:
            if self._stalled:
                _log.warning("%s makes progress again", self._kept.name)
            self._note(stalled=False)
            return
        if not self._stalled:
            self._report(entries, stopped)
        self._note(stalled=True)
        if state is State.HOPELESS:
            self._kill(process)

    def _note(self, *, stalled: bool) -> None:
        if stalled != self._stalled:
            self._stalled = stalled
            self._on_change(stalled)

    def _report(self, entries: Iterable[Entry], stopped: set[int]) -> None:
        what = describe(list(entries), stopped)
        _log.error("%s has made no progress for %.1f s: %s", self._kept.name, self._watch.quiet, what)

    def _kill(self, process: Child) -> None:
        """Kill a process after it has had a moment to write its stacks."""
        self._killed = True
        _log.error("%s is killed; before that it is asked to write its stacks", self._kept.name)
        stacks.dump(process.pid)
        process.killed_because = "it made no progress and was killed"
        asyncio.get_running_loop().call_later(DUMP_SECONDS, process.kill)
