"""What may be sampled next in answers that have a grammar, or a budget of thinking, and what becomes of them.

A matcher follows each such answer. Before rows of a step are sampled, the worker is told what the matchers
allow. A sequence whose matcher is late sits steps out until it is known what may come next, or is ended;
steps in flight are void for it, as for one that was preempted. Others go on.
"""

from __future__ import annotations

import time

from engine_core.grammar.guess_bounds import find_bounds
from engine_core.grammar.matcher import GrammarError, ThinkingMatcher, TokenMatcher, catch_up
from engine_core.protocol import Failed, OutputsByClient, Tokens
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import PlannedStep
from engine_core.scheduling.step_results import put
from worker.protocol import Bound, SeqStep, StepBounds, StepOutput

_LOOK_AGAIN = 0.1
"""The seconds after which late matchers are looked at, though none has said that it is done."""


class AnswerBounds(Feature):
    def __init__(self, core: Scheduler, ahead: int) -> None:
        """`ahead`: the most tokens of an answer that are not known yet when a step is planned."""
        self._core, self._ahead = core, ahead
        self._late: dict[Sequence, bool] = {}
        """The sequences that sit steps out, and whether each goes on by itself: nobody had paused it."""

    def enter(self, seq: Sequence) -> None:
        if seq.request.thinking is not None:
            seq.matcher = ThinkingMatcher(seq.request.thinking, self._ahead, seq.matcher)

    def forecast(self, seq: Sequence, now: float) -> Failed | None:
        """Follow what another engine has emitted of an answer, which may be impossible."""
        if seq.matcher is None or (reason := catch_up(seq.matcher, seq.request)) is None:
            return None
        return Failed(id=seq.id, code=400, message=reason)

    def leave(self, seq: Sequence) -> None:
        if self._late.pop(seq, None) is not None and seq.matcher is not None:
            seq.matcher.abandon()

    def bind(self, planned: PlannedStep, outputs: OutputsByClient) -> StepBounds | None:
        """Tell what the matcher of each bound row's sequence allows.

        A matcher must have taken every token before the one that it bounds, and the step's forward may run
        meanwhile. What comes behind guesses is told at once, as if they held. Rows whose outcome nobody
        wants may sample anything, and nobody wants that of a sequence whose matcher is late. A request whose
        text cannot go on ends.
        """
        number = planned.step.number
        rows: dict[int, Bound | None] = {}
        guesses: dict[int, list[Bound | None]] = {}
        wanted: list[tuple[SeqStep, Sequence, TokenMatcher]] = []
        for seq, row in zip(planned.seqs, planned.step.seqs, strict=True):
            if row.bound:
                rows[row.slot] = None
                if row.guesses:
                    guesses[row.slot] = [None] * len(row.guesses)
                if seq.wants(number) and seq.matcher is not None:
                    if len(seq.tokens) - seq.prompt_len < row.output_index:
                        return None
                    if seq.matcher.late:
                        self._sit_out(seq)
                    wanted.append((row, seq, seq.matcher))
        for row, seq, matcher in wanted:
            if not seq.wants(number):
                continue  # its matcher is late
            try:
                rows[row.slot], *behind = find_bounds(matcher, row.guesses)
            except GrammarError as error:
                put(outputs, seq, self._core.results.fail(seq, 400, str(error)))
                continue
            if row.guesses:
                guesses[row.slot][: len(behind)] = behind
                planned.counted[row.slot] = 1 + len(behind)
        return StepBounds(number, rows, guesses)

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        for seq in planned.seqs:
            if seq.matcher is not None and not seq.done and seq.matcher.late:
                self._sit_out(seq)

    def _sit_out(self, seq: Sequence) -> None:
        """Leave a sequence out of steps, and drop what steps in flight bring for it. One that runs apart is
        computed again instead, because nobody else runs meanwhile."""
        self._late[seq] = self._late.get(seq, False) or not seq.paused
        self._core.paused.pause([seq.key])
        if seq.slot is not None:
            self._core.preempt(seq)

    def next_time(self) -> float | None:
        return time.monotonic() + _LOOK_AGAIN if self._late else None

    def poll(self, now: float, in_flight: int) -> OutputsByClient:
        """Let those go on whose matcher is done, and end those that took longer than they may."""
        return self._settle(now, 0.0) if self._late else {}

    def work_beside(self, now: float, in_flight: int, wait: bool) -> None:
        """Wait a while for a matcher if there is nothing else to do."""
        if wait and not in_flight and self._late and len(self._core.paused) == len(self._core.live):
            for seq in self._late:
                if seq.matcher is not None:
                    seq.matcher.settle(_LOOK_AGAIN)
                    return

    def _settle(self, now: float, seconds: float) -> OutputsByClient:
        outputs: OutputsByClient = {}
        for seq, resumes in list(self._late.items()):
            if (matcher := seq.matcher) is None:
                continue
            answer: Tokens | Failed | None = None
            try:
                if not matcher.settle(seconds):
                    continue
                finish = "stop" if matcher.complete else "length" if len(seq.tokens) >= seq.limit else None
                if finish is not None:
                    answer = self._core.results.report(seq, Tokens(seq.id, [], finish=finish), now)
            except GrammarError as error:
                answer = Failed(id=seq.id, code=400, message=str(error))
            del self._late[seq]
            if answer is not None:
                self._core.end(seq)
                put(outputs, seq, answer)
            elif resumes:
                self._core.paused.take_out([seq])
        return outputs
