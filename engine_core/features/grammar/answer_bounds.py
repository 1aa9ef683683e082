"""Tells workers which tokens may come next in answers with a grammar or a thinking budget.

A matcher follows each such answer. Before rows of a step are sampled, the worker is told what the matchers
allow. A sequence whose matcher is late sits steps out until it is known what may come next, or is ended;
steps in flight are void for it, as for one that was preempted. Others go on.
"""

from __future__ import annotations

import time
from math import inf

from engine_core.grammar.draft_bounds import count_fitting, find_bounds
from engine_core.grammar.matcher import GrammarError, ThinkingMatcher, TokenMatcher
from engine_core.protocol import AddRequest, Admitted, Failed, Finish, OutputsByClient, Tokens
from engine_core.scheduling.feature import Feature, Taken
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.request_checks import all_within
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Place, Sequence
from engine_core.scheduling.step_results import put
from worker.protocol import Bound, Pooling, SeqStep, StepBounds, StepOutput

_LOOK_AGAIN = 0.1
"""The seconds after which late matchers are looked at, though none has said that it is done."""


class AnswerBounds(Feature):
    asked_by = "grammar", "thinking"

    def __init__(self, core: Scheduler, vocab_size: int, ahead: int) -> None:
        """`ahead`: the most tokens of an answer that are not known yet when a step is planned."""
        self._core, self._vocab_size, self._ahead = core, vocab_size, ahead
        self._coming: TokenMatcher | None = None
        """The matcher of the request that is added in this moment."""
        self.matchers: dict[Sequence, TokenMatcher] = {}
        self._counted: dict[Sequence, int] = {}
        """How many tokens of the row with guesses may count that is sampled next: those that have bounds."""
        self._late = core.paused.held
        """The sequences that sit steps out."""

    def add(
        self, client: int, request: AddRequest, now: float, matcher: TokenMatcher
    ) -> Admitted | Tokens | Failed | None:
        """Add a request to the core whose answer a matcher follows."""
        self._coming = matcher
        self._core.hooks.wake(self)  # though only the matcher may tell that it follows the answer
        try:
            return self._core.add(client, request, now)
        finally:
            self._coming = None
            if not self.matchers:
                self._core.hooks.rest(self)

    def refuse(self, add: AddRequest) -> str | None:
        if isinstance(add.params, Pooling) and (add.grammar is not None or add.thinking is not None):
            return "a text that is pooled has no answer: it takes no grammar and no thinking budget"
        if (thinking := add.thinking) is not None:
            for marker in (thinking.marker, *thinking.opens, *thinking.ends):
                if not all_within(marker, self._vocab_size):
                    most = self._vocab_size - 1
                    return (
                        f"a marker of thinking has token ids outside of the vocabulary, which is 0 to {most}"
                    )
        return None

    def enter(self, seq: Sequence) -> None:
        matcher, thinking = self._coming, seq.request.thinking
        if thinking is not None:
            matcher = ThinkingMatcher(thinking, self._ahead, matcher)
        if matcher is not None:
            self.matchers[seq], seq.is_followed = matcher, True
            self._core.hooks.wake(self)

    def forecast(self, seq: Sequence, now: float) -> Tokens | Failed | None:
        """Follow what another engine has emitted of an answer, which may be impossible, or at its end."""
        if not seq.is_followed:
            return None
        matcher = self.matchers[seq]
        try:
            for token in seq.tokens[seq.prompt_len :]:
                matcher.take(token)
        except GrammarError as error:
            return Failed(id=seq.id, code=400, message=str(error))
        if matcher.late:
            self._sit_out(seq)
            return None
        return self._last_answer(seq, now) if seq.resumed else None

    def leave(self, seq: Sequence) -> None:
        if seq.is_followed:
            matcher = self.matchers.pop(seq)
            self._counted.pop(seq, None)
            if (resumes := self._late.pop(seq, None)) is not None:
                matcher.abandon()
                seq.paused = not resumes  # whoever has it go on by another matcher does not wait for this one
            if not self.matchers:
                self._core.hooks.rest(self)

    def forced(self, seq: Sequence) -> list[int]:
        return self.matchers[seq].forced()

    def fitting(self, seq: Sequence, tokens: list[int]) -> int:
        return count_fitting(self.matchers[seq], tokens)

    def finish(self, step: StepBuilder) -> None:
        """Tell which rows wait for bounds: also those with guesses, within which thinking may end."""
        for at, seq in enumerate(step.seqs):
            if seq.is_followed:
                row = step.rows[at]
                if row.guesses or (row.samples and self.matchers[seq].binds):
                    step.change_row(at, bound=True)
                    step.binds = True

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
                if seq.wants(number):
                    if len(seq.tokens) - seq.prompt_len < row.output_index:
                        return None
                    matcher = self.matchers[seq]
                    if matcher.late:
                        self._sit_out(seq)
                    wanted.append((row, seq, matcher))
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
                self._counted[seq] = 1 + len(behind)
        return StepBounds(number, rows, guesses)

    def take(self, seq: Sequence, tokens: list[int], finish: Finish | None) -> Taken:
        """Have the matcher take new tokens, up to one behind which it is late or the text is complete."""
        matcher = self.matchers[seq]
        if (most := self._counted.pop(seq, len(tokens))) < len(tokens):
            tokens, finish = tokens[:most], None
        for count, token in enumerate(tokens, 1):
            try:
                matcher.take(token)
            except GrammarError as error:
                return Taken(count - 1, None, str(error))
            if finish == "stop" and count == len(tokens):
                break
            if matcher.late:
                return Taken(count, None, "")  # what follows waits until it is known whether it is complete
            if matcher.complete:
                return Taken(count, "stop", "")
        return Taken(len(tokens), finish, "")

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        for seq in planned.seqs:
            if seq.is_followed and not seq.done and self.matchers[seq].late:
                self._sit_out(seq)

    def _sit_out(self, seq: Sequence) -> None:
        """Leave a sequence out of steps, and drop what steps in flight bring for it. One that runs apart is
        computed again instead, because nobody else runs meanwhile."""
        resumes = self._late.pop(seq, not seq.paused)
        self._core.paused.pause([seq.key])
        self._late[seq] = resumes
        if seq.place is Place.RUNNING:
            self._core.preempt(seq)

    def next_time(self) -> float:
        return time.monotonic() + _LOOK_AGAIN if self._late else inf

    def poll(self, now: float, in_flight: int) -> OutputsByClient:
        """Let those go on whose matcher is done, and end those that took longer than they may."""
        return self._settle(now, 0.0) if self._late else {}

    def work_beside(self, now: float, in_flight: int, wait: bool) -> None:
        """Wait a while for a matcher if there is nothing else to do."""
        if wait and not in_flight and self._late and len(self._core.paused) == len(self._core.live):
            self.matchers[next(iter(self._late))].settle(_LOOK_AGAIN)

    def _settle(self, now: float, seconds: float) -> OutputsByClient:
        outputs: OutputsByClient = {}
        for seq, resumes in list(self._late.items()):
            matcher = self.matchers[seq]
            answer: Tokens | Failed | None = None
            try:
                if not matcher.settle(seconds):
                    continue
                answer = self._last_answer(seq, now)
            except GrammarError as error:
                answer = Failed(id=seq.id, code=400, message=str(error))
            del self._late[seq]
            if answer is not None:
                self._core.end(seq)
                put(outputs, seq, answer)
            elif resumes:
                self._core.paused.take_out([seq])
        return outputs

    def _last_answer(self, seq: Sequence, now: float) -> Tokens | None:
        """The end of an answer that has all its tokens, though nobody was told that the last is the last."""
        finish = "stop" if self.matchers[seq].complete else "length" if seq.left <= 0 else None
        if finish is None:
            return None
        return self._core.results.report(seq, Tokens(seq.id, [], finish=finish), now)
