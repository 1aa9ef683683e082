"""How long steps may take, where their time went, and when a request can expect its first answer."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from engine_core.config import EngineConfig
from engine_core.engine_stats import Rates, expected_length
from engine_core.scheduling.queue.owner_shares import Backlog
from engine_core.scheduling.queue.work_classes import WorkClass
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import PlannedStep, StepBuilder
from engine_core.scheduling.step_cost import READ, CostLine
from engine_core.scheduling.wait_forecast import AnswerLengths, Load, expected_wait, steps_until_ends
from worker.worker_facts import WorkerFacts

_log = logging.getLogger(__name__)

_GAP = 0.05
_DECODING_STEPS = 4
"""The default gap is at least so many times what the rows that decode take: less would leave too little time
for prompts, and more for streams than waiting requests pay for."""
_LEAST_PART = 0.25
"""The part that prompts get of a gap that was asked for, even if decoding rows alone take longer, or they
would starve."""
_ENOUGH_TOKENS = 512
"""Tokens that use a processor fully: with more in a step each takes as long, and who comes waits longer."""
_PROMPTS_SHARE = 1.5
"""A step that reads all prompts takes so many times as long beside texts, which get a third of it."""
_STEPS_OF_NEWCOMER = 1.5
"""Steps for which a newcomer beside background work waits: half of one that runs, on average, and its own."""
_LEAD, _LEAD_PART = 0.003, 0.25
"""Seconds, and part of a step, by which the next one is planned before it is expected to end, beside
background work: planning takes a while, and steps end early."""
_USUAL_PROMPT = 1024
"""The length of a prompt for which rates are told: a token of a longer one takes a little longer."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of sequences that generate, and how many of them must become free for one more."""

    running: Ordered[Sequence]
    usable: int
    """The number of slots that are taken, or free and with memory."""
    short: int


class Pace:
    """Plans in time: it knows what steps cost, what is still to be computed, and what has been."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts) -> None:
        self.line = CostLine(facts.timed_steps)
        self.readers = 0
        """Sequences whose tokens somebody reads as they come."""
        self.background = 0
        """Sequences of background work, waiting or running."""
        self.decoding = 0
        self.busy = 0.0
        self._facts = facts
        self._asked = config.max_token_gap_ms
        self._logs = config.enable_logging_iteration_details
        self._staged = config.pipeline_parallel_size > 1
        bounded = self._asked != 0 and facts.device == "cpu"
        self._is_brief = bounded and "generate" in facts.tasks
        """Whether steps have no more tokens than use a processor fully, though nobody reads: somebody may
        come who waits for a first token."""
        self._backlog = Backlog()
        self._decoding = 0.0
        """The seconds of the decoding rows of the step planned last."""
        self._decoding_rows = 0
        self._in_flight: deque[PlannedStep] = deque()
        """The steps in flight, the oldest of which began at `_begun`."""
        self._begun = 0.0
        self._lengths = AnswerLengths()
        self.most_tokens = 1
        """The most tokens that a sequence gets of one step."""

    @property
    def newest(self) -> PlannedStep | None:
        """The step that was planned last, if it is in flight."""
        return self._in_flight[-1] if self._in_flight else None

    @property
    def plan_at(self) -> float:
        """The time before which no step shall be planned behind those in flight.

        Beside background work there is always enough to fill one, and whoever comes after it is planned waits
        for all of it. So it is planned shortly before the one in flight ends, unless stages work on several
        or steps may take as long as they like.
        """
        if not (self.background and self._in_flight) or self._staged or not self._gap(self.line.single):
            return 0.0
        expected = sum([planned.expected for planned in self._in_flight])
        return self._begun + expected - max(_LEAD, _LEAD_PART * expected)

    # Planning.

    def bound(self, step: StepBuilder) -> None:
        """Bound what can be added to a step that has its decoding rows."""
        self._decoding, self._decoding_rows = step.cost - self.line.step, step.rows
        if gap := self._gap(step.cost):
            step.left = max(gap - step.cost, gap * _LEAST_PART)
        elif self._is_brief:
            step.left = self.line.tokens(_ENOUGH_TOKENS, 0)
            if (waiting := self._backlog.prompts[WorkClass.FIRST_TOKEN]) > self.line.tokens(1, 0):
                # Texts that share the step make first tokens later: they get what is left of a gap.
                rest = self._longest(step.cost) - step.cost
                step.left = min(step.left, max(_PROMPTS_SHARE * waiting, rest))

    def plan(self, planned: PlannedStep, now: float) -> None:
        if not self._in_flight:
            self._begun = now
        self._in_flight.append(planned)
        for seq, row, cost in zip(planned.seqs, planned.step.seqs, planned.costs, strict=True):
            if seq.backlog:
                self._reduce(seq, seq.backlog if row.samples or row.pools else min(seq.backlog, cost))

    def land(self, planned: PlannedStep, now: float, proposing: float = 0.0) -> float:
        """Learn from a step that has landed, and divide its time among its sequences.

        Returns its seconds, but for those that the drafter took behind it.
        """
        seconds, self._begun = now - self._begun, now
        self._in_flight.popleft()
        self.busy += seconds
        if self._logs:
            self._tell(planned, seconds)
        self.line.learn(planned.work, seconds - proposing, fills=planned.fills)
        each, scale = planned.step_cost / len(planned.seqs), seconds / planned.expected
        for seq, cost in zip(planned.seqs, planned.costs, strict=True):
            if not seq.done:
                seq.steps += 1
                seq.compute += (each + cost) * scale
        return seconds - proposing

    def _tell(self, planned: PlannedStep, seconds: float) -> None:
        ms = [f"{1000 * time:.1f}" for time in (seconds, planned.expected, planned.step_cost)]
        margin = f", as many as fit with a margin of {self.line.margin:.2f}" if planned.fills else ""
        decoding = len(planned.seqs) - planned.prompts - planned.texts
        held = f"{decoding} rows that decode, {planned.prompts} that read prompts, {planned.texts} texts"
        _log.info(
            "step %d: %s ms, expected %s, %s of them for itself%s: %s, %d tokens, which attend to %d",
            *(planned.step.number, *ms, margin, held, planned.tokens, planned.work[READ]),
        )

    def charge_in_flight(self, seq: Sequence) -> None:
        """Charge a sequence that ends for its rows in steps in flight, whose outcome it does not need."""
        for planned in self._in_flight:
            for other, cost in zip(planned.seqs, planned.costs, strict=True):
                if other is seq:
                    seq.compute += planned.step_cost / len(planned.seqs) + cost

    # What waits.

    def enter(self, seq: Sequence, cached: int) -> None:
        """Count a sequence that waits, and whose prompt begins with so many cached tokens."""
        count = len(seq.tokens) - cached
        reads = count * cached + count * count // 2 if self._facts.causal else count * count
        seq.backlog = self.line.tokens(count, reads) + self.line.end(seq.term, 1)
        for backlog in (self._backlog, seq.owner.backlog):
            backlog.prompts[seq.work_class] += seq.backlog
        self.count_answer(seq, 1)

    def count_answer(self, seq: Sequence, sign: int) -> None:
        """Count the answer to a sequence that waits; with the sign -1, count it no more."""
        if not seq.pools:
            for backlog in (self._backlog, seq.owner.backlog):
                backlog.add_answer(seq.left, may_stop=seq.may_stop, sign=sign)

    def begin_decoding(self, seq: Sequence) -> None:
        """Count a sequence that has got its first token."""
        self.decoding += 1
        self.readers += seq.request.streams

    def leave(self, seq: Sequence) -> None:
        self._reduce(seq, seq.backlog)
        if seq.slot is None:
            self.count_answer(seq, -1)
        if seq.first_token is not None:
            self.decoding -= 1
            self.readers -= seq.request.streams
            if seq.may_stop:
                self._lengths.learn(len(seq.tokens) - seq.prompt_len, stopped=seq.left > 0)

    def expected_wait(
        self, work_class: WorkClass, now: float, slots: Slots | None = None, own: Sequence | None = None
    ) -> float:
        """The seconds until `own` has its first answer; without it, until all have that wait in a class."""
        every = self.line.step + self._decoding
        prompts = list(self._backlog.prompts)
        if own is not None and own.owner.part < 1:
            ahead = own.owner.backlog.prompts[work_class]
            prompts[work_class] = min(prompts[work_class], ahead / own.owner.part)
        least = 0.0
        if slots is not None and slots.short > 0:
            every = max(every, self._full_step(slots.usable))
            least = self._steps_until_slot(slots, own)
        if slots is not None and own is not None and own.owner.is_held_back:
            least = max(least, self._steps_until_turn(slots, own))
        expected = sum([planned.expected for planned in self._in_flight])
        load = Load(
            in_flight=max(0.0, expected - (now - self._begun)) if self._in_flight else 0.0,
            every_step=every,
            for_prompts=self._for_prompts(every),
            backlog=tuple(prompts),
        )
        return expected_wait(load, work_class, least)

    def least_seconds(self, seq: Sequence) -> float:
        """The seconds that an answer takes after its first token, as long as it surely gets."""
        if seq.pools or seq.may_stop:
            return 0.0
        return -(-(seq.left - 1) // self.most_tokens) * self.line.single

    def rates(self, slots: Slots) -> Rates:
        """How fast the engine works when all slots are taken."""
        rows = slots.usable
        step = self._full_step(rows)
        token = self.line.tokens(_USUAL_PROMPT, _USUAL_PROMPT**2 // 2) / _USUAL_PROMPT
        return Rates(
            prompt_rate=1 / token,
            step=step,
            step_rows=rows,
            step_prompts=max(1.0, self._for_prompts(step) / token),
            stop_rate=self._lengths.stop_rate(slots.running),
        )

    def _full_step(self, rows: int) -> float:
        """The seconds of a step in which so many sequences get a token."""
        row = self._decoding / self._decoding_rows if self._decoding_rows else 0.0
        return self.line.step + rows * max(row, self.line.single - self.line.step)

    def _for_prompts(self, every: float) -> float:
        """The seconds that prompts get of each step, the rest of which takes `every`."""
        if gap := self._gap(every):
            return max(gap - every, gap * _LEAST_PART)
        most = self._facts.max_num_batched_tokens
        return self.line.tokens(min(most, _ENOUGH_TOKENS) if self._is_brief else most, 0)

    def _steps_until_slot(self, slots: Slots, own: Sequence | None) -> float:
        """The steps until enough sequences have ended, of those that run and those that wait before it."""
        stop_rate = self._lengths.stop_rate(slots.running)
        steps = self._steps_until_all_end(slots.running, self._backlog, own, stop_rate) / slots.usable
        if slots.short <= len(slots.running) == slots.usable:
            steps = steps_until_ends(slots.short, slots.running, stop_rate)
        if own is None or own.owner.part == 1:
            return steps
        # It waits for sequences of the same owner only, if these have their part of the slots.
        mine, part = own.owner, max(1.0, slots.usable * own.owner.part)
        if sum(mine.live) <= part:
            return 0.0
        running = [seq for seq in slots.running if seq.owner is mine]
        return min(steps, self._steps_until_all_end(running, mine.backlog, own, stop_rate) / part)

    def _steps_until_turn(self, slots: Slots, own: Sequence) -> float:
        """The steps until a sequence runs whose owner may have only so many that run."""
        running, stop_rate = [seq for seq in slots.running if seq.owner is own.owner], self._lengths.stop_rate
        steps = self._steps_until_all_end(running, own.owner.backlog, own, stop_rate(slots.running))
        return steps / max(1, own.owner.max_running)

    def _steps_until_all_end(
        self, running: Ordered[Sequence], waiting: Backlog, own: Sequence | None, stop_rate: float
    ) -> float:
        """The steps that answers take one after the other: those that run and those that wait, but `own`."""
        all_answers = Backlog()
        for seq in running:
            all_answers.add_answer(seq.left, may_stop=seq.may_stop)
        tokens = all_answers.answers(stop_rate) + waiting.answers(stop_rate)
        if own is not None:
            tokens -= expected_length(own.left, stop_rate) if own.may_stop else own.left
        return max(0.0, tokens)

    def _reduce(self, seq: Sequence, seconds: float) -> None:
        seq.backlog -= seconds
        for backlog in (self._backlog, seq.owner.backlog):
            backlog.prompts[seq.work_class] -= seconds

    def _gap(self, decoding: float) -> float:
        """The seconds that the next step may take, whose rows that decode take `decoding`; 0: as long as it
        likes."""
        if not (self.readers or self.background):  # whoever comes beside a step of background waits for it
            return 0.0
        return self._longest(decoding) / (_STEPS_OF_NEWCOMER if self.background else 1)

    def _longest(self, decoding: float) -> float:
        """The seconds that a step may take beside streams."""
        gap = 0.0
        if self._asked is not None:
            gap = self._asked / 1000
        elif self._facts.device == "cpu":
            rows = self.line.single if self.background else max(decoding, self.line.single)
            gap = max(_GAP, _DECODING_STEPS * rows)
        return gap / self.line.margin
