"""The engine's running totals, and when its statistics are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_core.engine_stats import STEP_ROWS, STEP_SECONDS, STEP_TOKENS, PlainHistogram, Stats, StepBuckets
from engine_core.scheduling.first_token_forecast import Slots
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.queue.waiting_queue import WaitingQueue
from engine_core.scheduling.step_timing import StepTiming

_AT_A_TIME = 64
"""The steps that are counted at a time."""
_INTERVAL = 0.25  # seconds: a gauge read by people and by scrapers needs no more


class LandedSteps:
    """The times and the makeup of all steps that have landed."""

    def __init__(self) -> None:
        buckets = (STEP_SECONDS, STEP_TOKENS, STEP_ROWS, STEP_ROWS, STEP_ROWS)
        self._all = [PlainHistogram(each) for each in buckets]
        self._new: list[tuple[float, int, int, int, int]] = []
        """What is counted of steps that are in no histogram yet."""

    def count(self, step: PlannedStep, seconds: float) -> None:
        decoding = len(step.seqs) - step.prompts - step.texts
        self._new.append((seconds, step.tokens, decoding, step.prompts, step.texts))
        if len(self._new) >= _AT_A_TIME:
            self._observe()

    def _observe(self) -> None:
        for histogram, values in zip(self._all, zip(*self._new, strict=True), strict=True):
            histogram.observe_all(values)
        self._new.clear()

    @property
    def buckets(self) -> StepBuckets:
        if self._new:
            self._observe()
        return StepBuckets(*[histogram.buckets for histogram in self._all])


@dataclass(slots=True)
class Counters:
    """Running totals since the start."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0
    kernel_compilations: int = 0
    landed: LandedSteps = field(default_factory=LandedSteps)

    def stats(
        self,
        *,
        running: int,
        waiting: WaitingQueue,
        kv_usage: float,
        pace: StepTiming,
        expected_wait: float,
        slots: Slots,
    ) -> Stats:
        """What is sent of the engine: these totals, and what its parts tell of this moment."""
        return Stats(
            running=running,
            waiting=waiting.count,
            waiting_tokens=waiting.tokens,
            kv_usage=kv_usage,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            preemptions=self.preemptions,
            steps=self.steps,
            step_tokens=self.step_tokens,
            busy=pace.busy,
            expected_wait=expected_wait,
            rates=pace.waits.rates(slots),
            landed=self.landed.buckets,
            kernel_compilations=self.kernel_compilations,
        )


class StatsFilter:
    """Lets statistics through when they have changed and the last ones were sent a while ago.

    The moment in which the engine becomes idle is sent at once, because nothing would be sent after it. What
    begins then is sent together with its end if that comes soon.
    """

    def __init__(self) -> None:
        self._last: Stats | None = None
        self._sent = 0.0
        self._was_idle = False

    def due(self, make: Callable[[], Stats], now: float, *, idle: bool) -> Stats | None:
        """The statistics if they are to be sent now, else None. They are made only if they may be due."""
        if self._was_idle and not idle:
            self._sent = now
        self._was_idle = idle
        if self._last is not None and not idle and now - self._sent < _INTERVAL:
            return None
        stats = make()
        if stats == self._last:
            return None
        self._last, self._sent = stats, now
        return stats
