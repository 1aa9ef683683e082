"""What becomes of a step that has landed: tokens are appended, blocks published, sequences ended.

The bounds that a step may have to wait for are made here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

from engine_core.grammar.guess_bounds import find_bounds
from engine_core.grammar.matcher import GrammarError, TokenMatcher
from engine_core.protocol import Failed, Finish, OutputsByClient, Pooled, Tokens, quarantined
from engine_core.scheduling.cache.cache_manager import CacheManager
from engine_core.scheduling.guesses.drafts import Drafts
from engine_core.scheduling.late_matchers import LateMatchers
from engine_core.scheduling.media import MediaItems
from engine_core.scheduling.pace import Pace
from engine_core.scheduling.queue.failed_steps import Suspects
from engine_core.scheduling.queue.waiting import PausedSequences
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import PlannedStep
from worker.protocol import (
    QUERY_GONE,
    REFUSED_ARGUMENTS,
    Bound,
    Sampling,
    SeqStep,
    StepBounds,
    StepOutput,
    TokenLogprobs,
)

Change = Callable[[Sequence], None]
"""The type of a function that brings a sequence into another state."""


class StepResults:
    """Turns what steps bring into new states of sequences, and into outputs for clients."""

    def __init__(
        self,
        pace: Pace,
        cache: CacheManager,
        media: MediaItems,
        paused: PausedSequences,
        suspects: Suspects,
        drafts: Drafts | None,
        *,
        preempt: Change,
        end: Change,
    ) -> None:
        self._pace = pace
        self._cache = cache
        self._media = media
        self._paused = paused
        self._suspects = suspects
        self._drafts = drafts
        self._preempt = preempt
        self._end = end
        self.late = LateMatchers(paused, preempt, end)
        """The sequences that sit steps out."""

    def land(self, planned: PlannedStep, output: StepOutput, now: float) -> OutputsByClient:
        """Append what a step has sampled, publish blocks, and end sequences; returns what clients get."""
        seconds = self._pace.land(planned, now, output.proposing)
        if self._drafts is not None:
            self._drafts.learn(planned, seconds, output.proposing)
        if planned.encoded:
            self._media.landed(planned.encoded)
        outputs: OutputsByClient = {}
        number, rows = planned.step.number, planned.step.seqs
        logprobs = output.logprobs or repeat(None, len(rows))
        for seq, row, token, entry in zip(planned.seqs, rows, output.tokens, logprobs, strict=True):
            wanted = seq.land(number, row)
            if row.kept and not (wanted and row.slot not in output.failed):
                self._cache.land_states(seq, row, wanted=False)
            if not wanted:
                continue  # it ended after this step was planned, or the step before failed
            if reason := output.failed.get(row.slot):
                code = 400 if reason.startswith(REFUSED_ARGUMENTS) else 503 if reason == QUERY_GONE else 500
                put(outputs, seq, self._fail(seq, code, reason))
                continue
            seq.prompt_logprobs += output.prompt_logprobs.get(row.slot, ())
            self._cache.publish(seq, row.start + row.count)
            if row.samples:
                tokens, entries = [token], [] if entry is None else [entry]
                if row.guesses:
                    held = output.held.get(row.slot, [])
                    if self._drafts is not None:
                        self._drafts.settle(seq, len(row.guesses), len(held))
                    tokens = [*held, token][: planned.counted.get(row.slot)]
                    entries = output.held_logprobs.get(row.slot, []) + entries
                for answer in self._append(seq, tokens, entries, now):
                    put(outputs, seq, answer)
                if self._drafts is not None and (draft := output.drafts.get(row.slot)):
                    self._drafts.offer(seq, draft)
            if row.kept:
                self._cache.land_states(seq, row, wanted=True)
            if row.pools:
                vectors = output.pooled[row.slot]
                put(outputs, seq, Pooled(seq.id, vectors, seq.cached, seq.timing(now), seq.expected))
                self._end(seq)
        return outputs

    def land_failed(
        self, planned: PlannedStep, now: float, *, short_of_memory: bool, behind: bool
    ) -> OutputsByClient:
        """Let the sequences of a step that failed, but not `behind` another, run apart; one alone ends."""
        self._pace.land(planned, now)
        self._media.lose()
        number, rows = planned.step.number, list(zip(planned.seqs, planned.step.seqs, strict=True))
        for seq, row in rows:
            self._cache.land_states(seq, row, wanted=False)
        again = list(dict.fromkeys([seq for seq, row in rows if seq.land(number, row)]))
        if not behind and len(again) == 1 and set(planned.seqs) == set(again):
            [seq] = again
            self._end(seq)
            short = Failed(seq.id, 503, "there is too little memory for this request now")
            return {seq.key[0]: [short if short_of_memory else quarantined(seq.id)]}
        self._paused.take_out(again)
        for seq in again:
            self._preempt(seq)
        if not behind:
            self._suspects.divide(planned, again)
        return {}

    def make_bounds(self, planned: PlannedStep, outputs: OutputsByClient) -> StepBounds | None:
        """What the matcher of each bound row's sequence allows; None if a row waits for an earlier sample.

        A matcher must have taken every token before the one that it bounds, and the step's forward may run
        meanwhile. What comes behind guesses is told at once, as if they held. Rows whose outcome nobody
        wants may sample anything, and nobody wants that of a sequence whose matcher is late. A request whose
        text cannot go on ends, and `outputs` gets its answer.
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
                        self.late.add(seq)
                    wanted.append((row, seq, seq.matcher))
        for row, seq, matcher in wanted:
            if not seq.wants(number):
                continue  # its matcher is late
            try:
                rows[row.slot], *behind = find_bounds(matcher, row.guesses)
            except GrammarError as error:
                put(outputs, seq, self._fail(seq, 400, str(error)))
                continue
            if row.guesses:
                guesses[row.slot][: len(behind)] = behind
                planned.counted[row.slot] = 1 + len(behind)
        return StepBounds(number, rows, guesses)

    def _append(
        self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprobs], now: float
    ) -> list[Tokens | Failed]:
        """Append the new tokens of a sequence, and end it if one of them ends the text -> the answers.

        All but the last of them were guesses. What follows a token that ends the text is dropped.
        """
        first = seq.first_token is None
        if first:
            seq.first_token = now
            self._pace.begin_decoding(seq)
        count, finish, refused = 0, None, ""
        for token in tokens:
            if seq.matcher is not None:
                try:
                    seq.matcher.take(token)
                except GrammarError as error:
                    refused = str(error)
                    break
            seq.tokens.append(token)
            count += 1
            if (finish := finish_reason(seq, token)) or (seq.matcher is not None and seq.matcher.late):
                break
        if seq.apart:
            self._suspects.acquit(seq)
        if not count:
            return [self._fail(seq, 400, refused)]
        if count > 1:
            seq.computed += count - 1
            self._cache.publish(seq, seq.computed)
        if self._drafts is not None:
            self._drafts.follow(seq, count)
        if finish and seq.in_flight:
            self._pace.charge_in_flight(seq)
        answer = Tokens(
            id=seq.id,
            tokens=tokens[:count],
            logprobs=logprobs[:count],
            prompt_logprobs=seq.prompt_logprobs if first and seq.wants_prompt_logprobs else None,
            cached=seq.cached if first else 0,
            finish=finish,
            timing=seq.timing(now) if finish or seq.request.times_each else None,
            expected=seq.expected if first else None,
            guesses=seq.guess_report if finish or seq.request.times_each else None,
        )
        if finish:
            self._end(seq)
        elif not refused and seq.matcher is not None and seq.matcher.late:
            self.late.add(seq)
        return [answer, self._fail(seq, 400, refused)] if refused else [answer]

    def _fail(self, seq: Sequence, code: int, reason: str) -> Failed:
        self._end(seq)
        return Failed(id=seq.id, code=code, message=reason)


def put(outputs: OutputsByClient, seq: Sequence, output: Tokens | Pooled | Failed) -> None:
    outputs.setdefault(seq.key[0], []).append(output)


def aborted(seq: Sequence, now: float) -> Tokens | Failed:
    """The last answer to a request that nobody waits for any more."""
    if seq.pools:
        return Failed(id=seq.id, code=503, message="the request was ended before it was done")
    timing, guesses = seq.timing(now), seq.guess_report
    return Tokens(id=seq.id, tokens=[], finish="abort", timing=timing, guesses=guesses)


def finish_reason(seq: Sequence, token: int) -> Finish | None:
    """The reason for which the token just appended is the last one, or None if it is not."""
    params = seq.request.params
    outputs_before = len(seq.tokens) - 1 - seq.prompt_len
    if (
        isinstance(params, Sampling)
        and token in params.stop_token_ids
        and outputs_before >= params.min_tokens
    ):
        return "stop"
    if seq.matcher is not None and seq.matcher.late:
        return None  # it may be complete
    if seq.matcher is not None and seq.matcher.complete:
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None
