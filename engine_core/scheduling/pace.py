"""How long steps may take, where their time went, and when a request can expect its first answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered

from engine_core.config import EngineConfig
from engine_core.scheduling.classes import WorkClass
from engine_core.scheduling.cost import CostLine
from engine_core.scheduling.forecast import Load, expected_wait
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import PlannedStep, StepBuilder
from worker.protocol import WorkerFacts

_GAP = 0.05
_SINGLE_STEPS = 4
"""The default gap is at least so many steps of one token: less would leave too little time for prompts."""
_LEAST_PART = 0.25
"""The part of a gap that prompts get even if decoding rows alone take longer, or they would starve."""
_OUTPUT, _OUTPUT_RATE = 100.0, 0.05
"""The tokens of an answer of unknown length, and how fast that guess follows the answers that end."""


class Pace:
    """Plans in time: it knows what steps cost, what is still to be computed, and what has been."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts) -> None:
        self.line = CostLine(facts.timed_steps)
        self.readers = 0
        """Sequences whose tokens somebody reads as they come."""
        self.decoding = 0
        """Sequences that have got their first token."""
        self.busy = 0.0
        """The seconds for which steps have run."""
        self._facts = facts
        self._asked = config.max_token_gap_ms
        self._backlog = [0.0] * len(WorkClass)
        self._decoding = 0.0
        """The seconds of the decoding rows of the step planned last."""
        self._in_flight: deque[PlannedStep] = deque()
        """The steps in flight, the oldest of which began at `_begun`."""
        self._begun = 0.0
        self._output = _OUTPUT

    # Planning.

    def bound(self, step: StepBuilder) -> None:
        """Bound what can be added to a step that has its decoding rows, if somebody reads a stream."""
        self._decoding = step.cost - self.line.step
        gap = self._gap()
        if gap:
            step.left = max(gap - step.cost, gap * _LEAST_PART)

    def plan(self, planned: PlannedStep, now: float) -> None:
        """Note that a step is on its way."""
        if not self._in_flight:
            self._begun = now
        self._in_flight.append(planned)
        for seq, row, cost in zip(planned.seqs, planned.step.seqs, planned.costs, strict=True):
            if seq.backlog:
                self._reduce(seq, seq.backlog if row.samples or row.pools else min(seq.backlog, cost))

    def land(self, planned: PlannedStep, now: float) -> None:
        """Learn from a step that has landed, and divide its time among the sequences that it was for."""
        seconds, self._begun = now - self._begun, now
        self._in_flight.popleft()
        self.busy += seconds
        self.line.learn(planned.work, seconds, bounded=planned.bounded)
        each, scale = planned.step_cost / len(planned.seqs), seconds / planned.expected
        for seq, cost in zip(planned.seqs, planned.costs, strict=True):
            if not seq.done:
                seq.steps += 1
                seq.compute += (each + cost) * scale

    def charge_in_flight(self, seq: Sequence) -> None:
        """Charge a sequence that ends for its rows in steps in flight, whose outcome it does not need."""
        for planned in self._in_flight:
            for other, cost in zip(planned.seqs, planned.costs, strict=True):
                if other is seq:
                    seq.compute += planned.step_cost / len(planned.seqs) + cost

    # What waits.

    def enter(self, seq: Sequence, cached: int) -> None:
        """Count the prompt of a sequence that waits, and begins with so many cached tokens."""
        count = len(seq.tokens) - cached
        reads = count * cached + count * count // 2 if self._facts.causal else count * count
        seq.backlog = self.line.tokens(count, reads) + self.line.end(seq.term, 1)
        self._backlog[seq.work_class] += seq.backlog

    def begin_decoding(self, seq: Sequence) -> None:
        """Count a sequence that has got its first token."""
        self.decoding += 1
        self.readers += seq.request.streams

    def leave(self, seq: Sequence) -> None:
        """Count a sequence no more, which has ended."""
        self._reduce(seq, seq.backlog)
        if seq.first_token is not None:
            self.decoding -= 1
            self.readers -= seq.request.streams
            outputs = len(seq.tokens) - seq.prompt_len
            self._output += _OUTPUT_RATE * (outputs - self._output)

    def expected_wait(
        self, work_class: WorkClass, short: int, running: Ordered[Sequence], now: float
    ) -> float:
        """The seconds until the sequence that entered this class last has its first answer.

        `short`: the number of running sequences that must end before it gets a slot.
        """
        every, gap = self.line.step + self._decoding, self._gap()
        widest = self.line.tokens(self._facts.max_num_batched_tokens, 0)
        expected = sum([planned.expected for planned in self._in_flight])
        load = Load(
            in_flight=max(0.0, expected - (now - self._begun)) if self._in_flight else 0.0,
            every_step=every,
            for_prompts=max(gap - every, gap * _LEAST_PART) if gap else widest,
            backlog=tuple(self._backlog),
        )
        wait = expected_wait(load, work_class)
        return max(wait, self._until_slot(short, running) * every) if short > 0 else wait

    def _until_slot(self, short: int, running: Ordered[Sequence]) -> float:
        """The steps until so many of the running sequences have ended, if answers have the usual length."""
        left = sorted(
            min(seq.limit - len(seq.tokens), max(1.0, self._output + seq.prompt_len - len(seq.tokens)))
            for seq in running
        )
        return left[min(short, len(left)) - 1] if left else 0.0

    def _reduce(self, seq: Sequence, seconds: float) -> None:
        seq.backlog -= seconds
        self._backlog[seq.work_class] -= seconds

    def _gap(self) -> float:
        """The seconds that the next step may take, 0 if that is not bounded."""
        if not self.readers:
            return 0.0
        gap = self._asked
        if gap is None:
            on_cpu = self._facts.device == "cpu"
            return max(_GAP, _SINGLE_STEPS * self.line.single) / self.line.margin if on_cpu else 0.0
        return gap / 1000 / self.line.margin
