"""Watches the event loop of an API process: tells that it goes on, and what holds it up if it is late.

The loop takes a turn every second, and several each second while requests run. The supervisor sees the turns
in the process's page, and replaces a process whose loop takes none for long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from worker.host.core_waits import CoreWaits, stack_of
from worker.host.progress_page import WORKING, ProgressWriter

IDLE_SECONDS, BUSY_SECONDS = 1.0, 0.25
"""Seconds between two turns without requests, and with some."""
LAG_SECONDS = 0.2
"""Seconds behind its time after which what the loop does is logged."""
WARNING_SECONDS = 10.0
"""Seconds between two warnings: one tells as much as many."""
CLOSE_TURN_SECONDS, CLOSE_LAG_SECONDS = 0.01, 0.05
"""The same two of a loop that is watched closely, whose every delay has a warning."""

_log = logging.getLogger(__name__)


class LoopWatch:
    def __init__(
        self,
        writer: ProgressWriter,
        observe_lag: Callable[[float], None],
        is_busy: Callable[[], bool],
        *,
        closely: bool = False,
    ) -> None:
        """Call this in the event loop that is watched; `start` begins. `is_busy`: whether requests run.

        With `closely` each callback is named by its stack that takes more than CLOSE_LAG_SECONDS, if it
        computes, or else if the process does not lack cores.
        """
        self._closely = closely
        self._lag = CLOSE_LAG_SECONDS if closely else LAG_SECONDS
        self._writer = writer
        self._observe_lag = observe_lag
        self._is_busy = is_busy
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._core_waits = CoreWaits()
        self._before = time.thread_time(), self._core_waits.seconds
        """The seconds that the loop's thread had computed at its last turn, and all had waited for a core."""
        self._stack = ""
        """The stack of a loop that is watched closely when its next turn was late."""
        self._turn = 0, 0.0
        """The number of the last turn, and when the next one is due."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._warned = -WARNING_SECONDS

    def start(self) -> None:
        self._turn = 0, time.monotonic()
        self._take_turn()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def _take_turn(self) -> None:
        number, due = self._turn
        now = time.monotonic()
        self._observe_lag(max(0.0, now - due))
        self._writer.write(WORKING, number + 1, 0, now, 0.0)
        seconds = BUSY_SECONDS if self._is_busy() else IDLE_SECONDS
        seconds = CLOSE_TURN_SECONDS if self._closely else seconds
        if self._closely:
            self._judge(now - due)
        self._turn = number + 1, now + seconds
        self._timer = self._loop.call_later(seconds, self._take_turn)

    def _watch(self) -> None:
        """Look, in a thread, for a turn that is late. A thread that is late itself can tell nothing."""
        while True:
            turn = self._turn
            if self._closely:
                self._core_waits.update()
            until = max(turn[1], time.monotonic()) + self._lag
            if self._stopped.wait(until - time.monotonic()):
                return
            now = time.monotonic()
            if self._turn is not turn or now >= until + self._lag:
                continue
            if self._closely:
                self._stack = self._stack or stack_of(self._loop_thread)
            elif now >= self._warned + WARNING_SECONDS:
                self._warned = now
                self._warn(now - turn[1], stack_of(self._loop_thread))

    def _judge(self, behind: float) -> None:
        """Tell where the loop was that takes a turn so many seconds late, unless it lacked a core."""
        (computed, waited), self._before = self._before, (time.thread_time(), self._core_waits.seconds)
        stack, self._stack = self._stack, ""
        if not stack:
            return
        computed, waited = time.thread_time() - computed, self._core_waits.update() - waited
        if max(min(computed, behind), behind - waited) > self._lag:
            self._warn(behind, stack)

    def _warn(self, behind: float, stack: str) -> None:
        _log.warning("the event loop is behind by %.2f s; it is here:\n%s", behind, stack)
