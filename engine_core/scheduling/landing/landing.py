"""What becomes of a step that has landed: tokens are appended, blocks published, sequences ended."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

from engine_core.grammar.matcher import GrammarError
from engine_core.protocol import Failed, OutputsByClient, Pooled, Tokens
from engine_core.scheduling.cache.cache_manager import CacheManager
from engine_core.scheduling.landing.bounds import make_bounds
from engine_core.scheduling.landing.ends import finish_reason, new_tokens, pooled
from engine_core.scheduling.pace import Pace
from engine_core.scheduling.queue.paused import PausedSequences
from engine_core.scheduling.queue.suspects import Suspects, verdict
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import PlannedStep
from worker.protocol import QUERY_GONE, StepBounds, StepOutput, TokenLogprobs

Change = Callable[[Sequence], None]
"""The type of a function that brings a sequence into another state."""


class Landing:
    def __init__(
        self,
        pace: Pace,
        cache: CacheManager,
        paused: PausedSequences,
        suspects: Suspects,
        *,
        preempt: Change,
        end: Change,
    ) -> None:
        self._pace = pace
        self._cache = cache
        self._paused = paused
        self._suspects = suspects
        self._preempt = preempt
        self._end = end

    def update(self, planned: PlannedStep, output: StepOutput, now: float) -> OutputsByClient:
        """Append what a step has sampled, publish blocks, and end sequences; returns what clients get."""
        self._pace.land(planned, now)
        outputs: OutputsByClient = {}
        number, rows = planned.step.number, planned.step.seqs
        logprobs = output.logprobs or repeat(None, len(rows))
        for seq, row, token, entry in zip(planned.seqs, rows, output.tokens, logprobs, strict=True):
            if not seq.land(number, row):
                continue  # it ended after this step was planned, or the step before failed
            if reason := output.failed.get(row.slot):
                put(outputs, seq, self._fail(seq, 503 if reason == QUERY_GONE else 500, reason))
                continue
            seq.prompt_logprobs += output.prompt_logprobs.get(row.slot, ())
            self._cache.publish(seq, row.start + row.count)
            if row.samples:
                put(outputs, seq, self._append(seq, token, entry, now))
            if row.pools:
                put(outputs, seq, pooled(seq, output.pooled[row.slot], now))
                self._end(seq)
        return outputs

    def fail(
        self, planned: PlannedStep, now: float, *, short_of_memory: bool, behind: bool
    ) -> OutputsByClient:
        """Let the sequences of a step that failed, but not `behind` another, run apart; one alone ends."""
        self._pace.land(planned, now)
        number, rows = planned.step.number, zip(planned.seqs, planned.step.seqs, strict=True)
        again = [seq for seq, row in rows if seq.land(number, row)]
        if not behind and again == planned.seqs and len(again) == 1:
            self._end(again[0])
            return {again[0].key[0]: [verdict(again[0], short_of_memory=short_of_memory)]}
        self._paused.take_out(again)
        for seq in again:
            self._preempt(seq)
        if not behind:
            self._suspects.divide(planned, again)
        return {}

    def bounds(self, planned: PlannedStep, outputs: OutputsByClient) -> StepBounds | None:
        """The bounds of a step; None if it has to wait for a step before it.

        Requests whose text cannot go on end, and `outputs` gets their answers.
        """
        made = make_bounds(planned)
        if made is None:
            return None
        for seq, reason in made.refused:
            put(outputs, seq, self._fail(seq, 400, reason))
        return made.bounds

    def _append(
        self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> Tokens | Failed:
        """Append a sampled token, and end the sequence if it is the last; returns what the client gets."""
        first = seq.first_token is None
        if first:
            seq.first_token = now
            self._pace.begin_decoding(seq)
        seq.tokens.append(token)
        if seq.apart:
            self._suspects.acquit(seq)
        if seq.matcher is not None:
            try:
                seq.matcher.take(token)
            except GrammarError as error:
                return self._fail(seq, 400, str(error))
        finish = finish_reason(seq, token)
        if finish and seq.in_flight:
            self._pace.charge_in_flight(seq)
        tokens = new_tokens(seq, token, logprobs, finish, first=first, now=now)
        if finish:
            self._end(seq)
        return tokens

    def _fail(self, seq: Sequence, code: int, reason: str) -> Failed:
        self._end(seq)
        return Failed(id=seq.key[1], code=code, message=reason)


def put(outputs: OutputsByClient, seq: Sequence, output: Tokens | Pooled | Failed) -> None:
    outputs.setdefault(seq.key[0], []).append(output)
