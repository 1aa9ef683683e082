"""The rules by which a process that should make progress and does not is found. They know no clock.

A process is judged by what it wrote into its page, and by what the kernel says of it, each time the watcher
looks. Time counts only while the watcher itself runs: after a pause of the whole machine, or of all its
processes, nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from worker.host.progress_page import IDLE, STARTING, WORKING, Entry

STALL_SECONDS = 5.0
"""Seconds without progress after which a process with work gets nothing new."""
KILL_SECONDS = 30.0
"""Seconds without progress after which it is killed, so that another one takes its place."""
STALL_FACTOR, KILL_FACTOR = 2.0, 10.0
"""Multiples of the time that a step of its size usually takes, which it has in any case."""
LATE_SECONDS = 2.0
"""Seconds between two looks after which the watcher takes it that it did not run itself."""


class State(Enum):
    WELL = "well"
    STALLED = "stalled"
    HOPELESS = "hopeless"


class Watch:
    """What is known of one process, and of those that it has started itself."""

    def __init__(self) -> None:
        self.quiet = 0.0
        """The seconds for which it should have made progress, and has made none."""
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
        waits = own.state == WORKING or (own.state == IDLE and stopped)
        if moved or not waits or elapsed > LATE_SECONDS:
            self.quiet = 0.0
            return State.WELL
        self.quiet += elapsed
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
