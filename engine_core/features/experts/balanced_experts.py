"""Collects workers' reports on experts that are balanced by load, for statistics."""

from __future__ import annotations

from msgspec.structs import replace

from engine_core.engine_stats import REARRANGEMENT_SECONDS, ExpertStats, PlainHistogram, Stats
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import PlannedStep
from worker.protocol import Balancedness, StepOutput


class BalancedExperts(Feature):
    def __init__(self) -> None:
        self._seconds = PlainHistogram(REARRANGEMENT_SECONDS)
        self._balancedness: Balancedness | None = None
        self._tokens: dict[int, list[int]] = {}
        self._told = False

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        if (report := output.experts) is None:
            return
        self._told = True
        self._balancedness = report.balancedness or self._balancedness
        self._tokens = report.tokens or self._tokens
        for took in report.rearrangements:
            self._seconds.observe(took)

    def add_stats(self, stats: Stats) -> Stats:
        if not self._told:
            return stats
        return replace(stats, experts=ExpertStats(self._balancedness, self._seconds.buckets, self._tokens))
