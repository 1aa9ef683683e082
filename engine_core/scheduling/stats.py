"""The engine's running totals, and when its statistics are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_core.engine_stats import (
    REARRANGEMENT_SECONDS,
    STEP_ROWS,
    STEP_SECONDS,
    STEP_TOKENS,
    ExpertStats,
    PlainHistogram,
    Stats,
    StepBuckets,
)
from engine_core.scheduling.pace import Pace
from engine_core.scheduling.queue.waiting import WaitingQueue
from engine_core.scheduling.step_builder import PlannedStep
from engine_core.scheduling.wait_forecast import Slots
from worker.protocol import Balancedness, ExpertReport, StepOutput

_INTERVAL = 0.25  # seconds: a gauge read by people and by scrapers needs no more


class LandedSteps:
    """The times and the makeup of all steps that have landed."""

    def __init__(self) -> None:
        self._seconds, self._tokens = PlainHistogram(STEP_SECONDS), PlainHistogram(STEP_TOKENS)
        self._decoding, self._prompts, self._texts = (PlainHistogram(STEP_ROWS) for _ in range(3))

    def count(self, step: PlannedStep, seconds: float) -> None:
        self._seconds.observe(seconds)
        self._tokens.observe(step.tokens)
        self._decoding.observe(len(step.seqs) - step.prompts - step.texts)
        self._prompts.observe(step.prompts)
        self._texts.observe(step.texts)

    @property
    def buckets(self) -> StepBuckets:
        of_rows = (self._decoding.buckets, self._prompts.buckets, self._texts.buckets)
        return StepBuckets(self._seconds.buckets, self._tokens.buckets, *of_rows)


class BalancedExperts:
    """What the worker has told of experts that are balanced by load."""

    def __init__(self) -> None:
        self._seconds = PlainHistogram(REARRANGEMENT_SECONDS)
        self._balancedness: Balancedness | None = None
        self._tokens: dict[int, list[int]] = {}
        self._told = False

    def take(self, report: ExpertReport) -> None:
        self._told = True
        self._balancedness = report.balancedness or self._balancedness
        self._tokens = report.tokens or self._tokens
        for seconds in report.rearrangements:
            self._seconds.observe(seconds)

    @property
    def stats(self) -> ExpertStats | None:
        if not self._told:
            return None
        return ExpertStats(self._balancedness, self._seconds.buckets, self._tokens)


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
    experts: BalancedExperts = field(default_factory=BalancedExperts)

    def stats(
        self,
        *,
        running: int,
        waiting: WaitingQueue,
        kv_usage: float,
        pace: Pace,
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
            experts=self.experts.stats,
        )

    def heed(self, output: StepOutput) -> None:
        self.kernel_compilations = output.kernel_compilations
        if output.experts is not None:
            self.experts.take(output.experts)


class StatsFilter:
    """Lets statistics through when they have changed and the last ones were sent a while ago.

    The moment in which the engine becomes idle is sent at once, because nothing would be sent after it.
    """

    def __init__(self) -> None:
        self._last: Stats | None = None
        self._sent = 0.0

    def due(self, make: Callable[[], Stats], now: float, *, idle: bool) -> Stats | None:
        """The statistics if they are to be sent now, else None. They are made only if they may be due."""
        if self._last is not None and not idle and now - self._sent < _INTERVAL:
            return None
        stats = make()
        if stats == self._last:
            return None
        self._last, self._sent = stats, now
        return stats
