"""Steps in time: how long each may take, what was learned from it, and whose time it was."""

from __future__ import annotations

import logging
from collections import deque
from operator import attrgetter

from engine_core.config import EngineConfig
from engine_core.scheduling.first_token_forecast import FirstTokenForecast, Slots
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.queue.shares import WorkClass
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_time_model import READ, StepTime, StepTimeLimit
from worker.worker_facts import WorkerFacts

_expected = attrgetter("expected")
_log = logging.getLogger(__name__)

_LEAD, _LEAD_PART = 0.003, 0.25
"""Seconds, and part of a step, by which the next one is planned before it is expected to end, beside
background work: planning takes a while, and steps end early."""


class StepTiming:
    """Limits steps in time, learns from those that land, and divides their time among sequences."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts) -> None:
        self.step_time = StepTime(facts.timed_steps)
        self.step_bound = StepTimeLimit(config, facts, self.step_time)
        self.may_split = config.enable_chunked_prefill and facts.cuts_prompts
        """Whether a step may compute a chunk of a prompt, and not all of it."""
        self.waits = FirstTokenForecast(
            *(self.step_time, self.step_bound), causal=facts.causal, overtakes=self.may_split
        )
        self.decoding = 0
        self.busy = 0.0
        self._logs = config.enable_logging_iteration_details
        self._staged = config.pipeline_parallel_size > 1
        self.in_flight: deque[PlannedStep] = deque()
        """The steps in flight, the oldest of which began at `_begun`."""
        self._begun = 0.0
        self.most_tokens = 1
        """The most tokens that a sequence gets of one step."""

    @property
    def plan_at(self) -> float:
        """The time before which no step shall be planned behind those in flight.

        Beside background work there is always enough to fill one, and whoever comes after it is planned waits
        for all of it. So it is planned shortly before the one in flight ends, unless stages work on several
        or steps may take as long as they like.
        """
        bound = self.step_bound
        if not (bound.background and self.in_flight) or self._staged or not bound.is_bounded:
            return 0.0
        expected = sum(map(_expected, self.in_flight))
        return self._begun + expected - max(_LEAD, _LEAD_PART * expected)

    def bound(self, step: StepBuilder) -> None:
        """Bound what can be added to a step that has its decoding rows."""
        waits = self.waits
        waits.decoding, waits.decoding_rows = step.cost - self.step_time.step, len(step.rows)
        only_prompt = len(waits.prompts) == 1
        step.left = self.step_bound.left(step.cost, waits.newcomers, only_prompt=only_prompt)
        step.spare = self.step_bound.spare

    def plan(self, planned: PlannedStep, now: float) -> None:
        if not self.in_flight:
            self._begun = now
        self.in_flight.append(planned)
        if self.waits.prompts:
            self.waits.plan(planned)

    def land(self, planned: PlannedStep, now: float, proposing: float = 0.0) -> float:
        """Learn from a step that has landed, and divide its time among its sequences.

        Returns its seconds, but for those that the drafter took behind it.
        """
        seconds, self._begun = now - self._begun, now
        self.in_flight.popleft()
        self.busy += seconds
        if self._logs:
            self._tell(planned, seconds)
        self.step_time.learn(planned.work, seconds - proposing, fills=planned.fills)
        each, scale = planned.step_cost / len(planned.seqs), seconds / planned.expected
        for seq, cost in zip(planned.seqs, planned.costs, strict=True):
            if not seq.done:
                seq.record.steps += 1
                seq.record.compute += (each + cost) * scale
        return seconds - proposing

    def _tell(self, planned: PlannedStep, seconds: float) -> None:
        ms = [f"{1000 * time:.1f}" for time in (seconds, planned.expected, planned.step_cost)]
        margin = f", as many as fit with a margin of {self.step_time.margin:.2f}" if planned.fills else ""
        decoding = len(planned.seqs) - planned.prompts - planned.texts
        held = f"{decoding} rows that decode, {planned.prompts} that read prompts, {planned.texts} texts"
        _log.info(
            "step %d: %s ms, expected %s, %s of them for itself%s: %s, %d tokens, which attend to %d",
            *(planned.step.number, *ms, margin, held, planned.tokens, planned.work[READ]),
        )

    def charge_in_flight(self, seq: Sequence) -> None:
        """Charge a sequence that ends for its rows in steps in flight, whose outcome it does not need."""
        for planned in self.in_flight:
            for other, cost in zip(planned.seqs, planned.costs, strict=True):
                if other is seq:
                    seq.record.compute += planned.step_cost / len(planned.seqs) + cost

    def begin_decoding(self, seq: Sequence) -> None:
        """Count a sequence that has got its first token."""
        self.decoding += 1
        self.step_bound.readers += seq.request.streams

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self.waits.leave(seq)
        if seq.record.first_token is not None:
            self.decoding -= 1
            self.step_bound.readers -= seq.request.streams

    def expected_wait(
        self, work_class: WorkClass, now: float, slots: Slots | None = None, own: Sequence | None = None
    ) -> float:
        """The seconds until `own` has its first answer; without it, until all have that wait in a class."""
        expected = sum(map(_expected, self.in_flight))
        in_flight = max(0.0, expected - (now - self._begun)) if self.in_flight else 0.0
        return in_flight + self.waits.expected(work_class, slots, own)

    def least_seconds(self, seq: Sequence) -> float:
        """The seconds that an answer takes after its first token, as long as it surely gets."""
        if seq.pools or seq.may_stop:
            return 0.0
        return -(-(seq.left - 1) // self.most_tokens) * self.step_time.single
