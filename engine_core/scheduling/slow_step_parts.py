"""Names the parts of an engine's steps that take five times as long as expected, for `--debug-steps`.

No request's work may hold up the thread that runs steps. While the option is on, the methods by which that
thread does its parts are wrapped; while it is off, nothing is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import wraps
from math import inf
from operator import attrgetter
from typing import Any

from engine_core.scheduling.planned_step import PlannedStep
from worker.host.core_waits import CoreWaits, stack_of

TIMES = 5
"""How many times as long as expected a part may take."""
EXPECTED_SECONDS = 0.01
"""The seconds that a part is expected to take of which nothing better is known, and a step of the worker at
the least: one that takes a millisecond alone takes many when the machine does something else, too."""
LOOK_SECONDS = 0.01
"""Seconds between two looks at the part that runs, whose stack is taken once it is late."""

_MOST = TIMES * EXPECTED_SECONDS
_PARTS = (
    ("messages", "", "_read", _MOST),
    ("waiting for messages", "_poller", "poll", inf),
    ("idle work", "_engine", "prepare", _MOST),
    ("outputs", "", "_write", _MOST),
    ("step", "_engine", "step", _MOST),
    ("intake", "_engine.intake", "advance", _MOST),
    ("preparation", "_engine._preparation", "run", inf),
    ("plan", "_engine._scheduler", "schedule", _MOST),
    ("submission", "_engine._in_flight", "submit", _MOST),
    ("bounds", "_engine._scheduler", "bind", _MOST),
    ("waiting for the worker", "_engine._in_flight", "take", inf),
    ("landing", "_engine", "_finish", _MOST),
)
"""The name of each part, the way from the engine's loop to the owner of its method, the method, and the
seconds above which it is named. A part within another one counts by itself alone. Waiting has no bound, for
the worker's steps are measured as a whole, nor has what the worker prepares, which is no request's work."""

_log = logging.getLogger(__name__)
_Method = Callable[..., Any]


@dataclass(slots=True, eq=False)
class _Part:
    """A part that has begun."""

    name: str
    most: float
    """The seconds above which it is named."""
    began: float
    computed: float
    """The seconds that the thread had computed when it began."""
    waits: float
    """The seconds for which threads had waited for cores by then."""
    inner: float = 0.0
    """The seconds that parts within it have taken."""
    inner_computed: float = 0.0
    """The seconds that the thread has computed within those."""
    stack: str = ""
    """The stack of the thread when the part was late."""


class StepWatch:
    """Measures the parts of an engine's loop.

    A part counts by what its thread computes. Where that waits, it counts by its time on the clock, less the
    time for which threads of the process lacked a core.
    """

    def __init__(self, loop: object) -> None:
        """Call this in the thread that will run `loop`, which is an `EngineLoop`."""
        self._loop, self._thread = loop, threading.get_ident()
        self._core_waits = CoreWaits()
        self._landed_waits = self._core_waits.seconds
        """The seconds for which threads had waited for cores when a step landed last."""
        self._waited = 0.0
        """The seconds for which the thread has waited while the oldest step was in flight."""
        self._open: list[_Part] = []
        """The part that runs comes last, behind those within which it runs."""
        self._wrap(loop, "_obey", self._then_wrap)
        self._wrap_all()
        threading.Thread(target=self._look_for_ever, name="step watch", daemon=True).start()

    def _wrap_all(self) -> None:
        """Wrap what is not wrapped yet: a model that is loaded again has another scheduler and worker."""
        for name, way, method, most in _PARTS:
            owner = attrgetter(way)(self._loop) if way else self._loop
            self._wrap(owner, method, lambda call, name=name, most=most: self._measured(call, name, most))
        landed = attrgetter("_engine._scheduler.counters.landed")(self._loop)
        self._wrap(landed, "count", self._judged)

    def _wrap(self, owner: object, method: str, wrapped: Callable[[_Method], _Method]) -> None:
        call = getattr(owner, method)
        if not hasattr(call, "__wrapped__"):
            setattr(owner, method, wraps(call)(wrapped(call)))

    def _then_wrap(self, obey: _Method) -> _Method:
        def obey_and_wrap(*args: Any) -> None:
            obey(*args)
            self._wrap_all()

        return obey_and_wrap

    def _measured(self, call: _Method, name: str, most: float) -> _Method:
        def measured(*args: Any, **kwargs: Any) -> Any:
            waits, in_flight = self._core_waits.seconds, bool(self._steps_in_flight())
            self._open.append(_Part(name, most, time.monotonic(), time.thread_time(), waits))
            try:
                return call(*args, **kwargs)
            finally:
                self._close(self._open.pop(), in_flight=in_flight)

        return measured

    def _steps_in_flight(self) -> Sized:
        return attrgetter("_engine._in_flight.steps")(self._loop)

    def _close(self, part: _Part, *, in_flight: bool) -> None:
        """Judge a part that has ended. `in_flight`: whether a step was when it began."""
        whole, computed = time.monotonic() - part.began, time.thread_time() - part.computed
        if self._open:
            self._open[-1].inner += whole
            self._open[-1].inner_computed += computed
        if part.most == inf and in_flight:
            self._waited += whole
        own = whole - part.inner
        if own > part.most:
            own = max(computed - part.inner_computed, own - (self._core_waits.update() - part.waits))
        _judge(part.name, own, part.most, part.stack)

    def _judged(self, count: _Method) -> _Method:
        """Judge each step of the worker that has landed by the time that was expected when it was planned.

        It has taken as long as the engine's thread has waited: what that thread did instead is judged itself.
        """

        def judge_and_count(planned: PlannedStep, seconds: float) -> None:
            own, most = min(seconds, self._waited), TIMES * max(EXPECTED_SECONDS, planned.expected)
            if own > most:
                own -= self._core_waits.update() - self._landed_waits
            _judge("worker", own, most)
            self._waited, self._landed_waits = 0.0, self._core_waits.seconds
            count(planned, seconds)

        return judge_and_count

    def _look_for_ever(self) -> None:
        """Take, in a thread, the stack of each part that is late."""
        while True:
            time.sleep(LOOK_SECONDS)
            self._core_waits.update()
            for part in self._open[-1:]:
                if not part.stack and time.monotonic() - part.began - part.inner > part.most:
                    part.stack = stack_of(self._thread)


def _judge(name: str, seconds: float, most: float, stack: str = "") -> None:
    """Name a part in the log if it took longer than it may."""
    if seconds > most:
        where = f"; it was here:\n{stack}" if stack else ""
        _log.warning("a part of a step, %s, took %.3f s, more than %.3f s%s", name, seconds, most, where)
