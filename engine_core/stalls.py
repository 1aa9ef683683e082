"""Finds child processes that make no progress: they get nothing new, and are killed if that lasts.

A process is judged by what it wrote into its page, and by what the kernel says of it, each time the watcher
looks. Time counts only while the watcher itself runs: after a pause of the whole machine, or of all its
processes, nobody is blamed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from math import inf
from pathlib import Path
from typing import Protocol, TypeVar

from worker.child import DUMP_STACKS, Child
from worker.host.progress_page import IDLE, STARTING, WORKING, Entry, ProgressPage

STALL_SECONDS = 5.0
"""Seconds without progress after which a process with work gets nothing new."""
KILL_SECONDS = 30.0
"""Seconds without progress after which it is killed, so that another one takes its place."""
STALL_FACTOR, KILL_FACTOR = 2.0, 10.0
"""Multiples of the time that a step of its size usually takes, which it has in any case."""
LATE_SECONDS = 2.0
"""Seconds between two looks after which the watcher takes it that it did not run itself."""
TICK_SECONDS = 0.5
DUMP_SECONDS = 0.5
"""Seconds for a process to write its stacks before it is killed."""

_PROCESSES = Path("/proc")
_NO_START = "it showed no progress of its start for {:g} s (--engine-ready-timeout)"
_REMEDY = ": what it waits for stands in the log before, and a larger number gives it longer"

_log = logging.getLogger(__name__)


class State(Enum):
    WELL = "well"
    STALLED = "stalled"
    HOPELESS = "hopeless"


class ProgressRules:
    """Judges whether one process, and those that it has started itself, make progress."""

    def __init__(self, start_seconds: float = inf) -> None:
        """`start_seconds`: the most that may pass between two signs that its start goes on."""
        self.quiet = 0.0
        """The seconds for which it should have made progress, and has made none."""
        self._start_seconds = start_seconds
        self._last: Entry | None = None

    def look(
        self, elapsed: float, entries: Sequence[Entry], *, stopped: bool, leaving: bool = False
    ) -> State:
        """Judge by its entry, which is the first of these, `elapsed` seconds after the last look.

        `stopped`: the kernel runs it no more, or one of those that it has started. A server that is `leaving`
        does not wait for a process that is stopped or stalled.
        """
        own, last = entries[0], self._last
        self._last = own
        moved = last is None or own[:5] != last[:5]
        waits = own.state in (WORKING, STARTING) or (own.state == IDLE and stopped)
        if moved or not waits or elapsed > LATE_SECONDS:
            self.quiet = 0.0
            return State.WELL
        self.quiet += elapsed
        if own.state == STARTING:
            return State.HOPELESS if self.quiet >= self._start_seconds else State.WELL
        if leaving and stopped:
            return State.HOPELESS
        stall = max(STALL_SECONDS, STALL_FACTOR * own.usual)
        if self.quiet >= (stall if leaving else max(KILL_SECONDS, KILL_FACTOR * own.usual)):
            return State.HOPELESS
        return State.STALLED if self.quiet >= stall else State.WELL


def describe(entries: Sequence[Entry], stopped: set[int]) -> str:
    """A clause for the log on what each of these processes does; `stopped` are the ids of those that are."""
    return ", ".join(f"process {one.pid} {_doing(one, one.pid in stopped)}" for one in entries)


def _doing(entry: Entry, stopped: bool) -> str:
    does = {STARTING: "starts", IDLE: "has nothing to do"}.get(entry.state, "works")
    if entry.tokens and entry.state == WORKING:
        does = f"computes step {entry.number}, of {entry.tokens} tokens"
    return does + (" and is stopped" if stopped else "")


class Watchable(Protocol):
    """A process that writes to a page how its work goes on, and those that are started in its place."""

    name: str
    process: Child
    page: ProgressPage


Watched = TypeVar("Watched", bound=Watchable)


async def watch(
    processes: Sequence[Watched],
    on_change: Callable[[Watched, bool], None],
    *,
    leaving: Callable[[], bool],
    on_look: Callable[[], None] = lambda: None,
    start_seconds: float = inf,
) -> None:
    """Looks at processes again and again, and acts by the rules, until it is cancelled. There may be others
    of them each time.

    `on_change` is told of a process with True that it has stalled, and with False that it goes on or that
    another one begins in its place. `on_look` is called at each look. A process is killed
    whose start has not gone on for `start_seconds`.
    """
    watched: dict[Watched, _Watched] = {}
    before = time.monotonic()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        before, elapsed = time.monotonic(), time.monotonic() - before
        on_look()
        for one in processes:
            if one not in watched:
                watched[one] = _Watched(one, lambda stalled, one=one: on_change(one, stalled), start_seconds)
            watched[one].look(elapsed, leaving=leaving())


class _Watched:
    def __init__(self, kept: Watchable, on_change: Callable[[bool], None], start_seconds: float) -> None:
        self._kept = kept
        self._start_seconds = start_seconds
        self._on_change = on_change
        self._stalled = False
        self._killed = False
        self._process: Child | None = None
        self._rules = ProgressRules(start_seconds)

    def look(self, elapsed: float, *, leaving: bool) -> None:
        process = self._kept.process
        if process is not self._process:  # another one, which has just been started
            self._process, self._killed = process, False
            self._rules = ProgressRules(self._start_seconds)
            self._note(stalled=False)
        entries = self._kept.page.entries()
        if self._killed or process.exit_code is not None:
            return
        stopped = {one.pid for one in entries if one.pid and is_stopped(one.pid)}
        state = self._rules.look(elapsed, entries, stopped=bool(stopped), leaving=leaving)
        if state is State.WELL:
            if self._stalled:
                _log.warning("%s makes progress again", self._kept.name)
            self._note(stalled=False)
            return
        if entries[0].state == STARTING:
            self._kill(process, _NO_START.format(self._start_seconds), _REMEDY)
            return
        if not self._stalled:
            what = describe(entries, stopped)
            _log.error("%s has made no progress for %.1f s: %s", self._kept.name, self._rules.quiet, what)
        self._note(stalled=True)
        if state is State.HOPELESS:
            self._kill(process, "it made no progress")

    def _note(self, *, stalled: bool) -> None:
        if stalled != self._stalled:
            self._stalled = stalled
            self._on_change(stalled)

    def _kill(self, process: Child, reason: str, remedy: str = "") -> None:
        """Kill a process after it has had a moment to write its stacks."""
        self._killed = True
        _log.error("%s: %s; it is killed, and is asked to write its stacks before", self._kept.name, reason)
        _ask_for_stacks([process.pid, *descendants(process.pid)])
        process.killed_because = f"{reason} and was killed{remedy}"
        asyncio.get_running_loop().call_later(DUMP_SECONDS, process.kill)


def dump_all() -> None:
    """Dump the stacks of this process and, on Linux, of all its descendants that do so at the signal."""
    faulthandler.dump_traceback()
    _ask_for_stacks(descendants(os.getpid()))


def _ask_for_stacks(pids: Iterable[int]) -> None:
    """Have these processes write their stacks to stderr, on Linux. Those that are stopped cannot."""
    for pid in pids:
        with suppress(OSError):
            if _catches_signal(pid):
                os.kill(pid, DUMP_STACKS)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, as Linux says; False where nobody says so."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False


def descendants(pid: int) -> Iterator[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in _PROCESSES.glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(entry.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    frontier = [pid]
    while frontier:
        below = children.get(frontier.pop(), [])
        frontier += below
        yield from below


def _catches_signal(pid: int) -> bool:
    """Whether a process catches the signal, which would end it otherwise: a compiler, or one that begins."""
    status = (_PROCESSES / str(pid) / "status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (DUMP_STACKS - 1) & 1)
