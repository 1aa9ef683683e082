"""Lands steps: appends their tokens, publishes the blocks they filled, and ends sequences.

The rows of a step land one after the other, in the order in which they were planned. A row brings nothing if
its sequence has ended or was preempted meanwhile, and its sequence ends if the row has failed. Else the
blocks that it has filled are published, so that others find them, and its tokens are appended up to one that
ends the text; a feature that follows the sequence may end it sooner. What clients get is returned, and never
sent from here.

When a step has failed as a whole, its sequences are preempted, and computed again in smaller groups.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

from msgspec.structs import replace

from engine_core.protocol import Failed, Finish, OutputsByClient, Pooled, Tokens, lacks_memory, quarantined
from engine_core.scheduling.cache.cache_manager import CacheManager
from engine_core.scheduling.feature import Hooks
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.queue.waiting_queue import PausedSequences
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_timing import StepTiming
from worker.protocol import (
    QUERY_GONE,
    REFUSED_ARGUMENTS,
    Sampling,
    StepOutput,
    TokenLogprobs,
)

Change = Callable[[Sequence], None]
"""The type of a function that changes what becomes of a sequence."""


class StepResults:
    """Brings sequences on by what steps bring, and turns that into outputs for clients."""

    def __init__(
        self,
        hooks: Hooks,
        pace: StepTiming,
        cache: CacheManager,
        paused: PausedSequences,
        *,
        preempt: Change,
        end: Change,
    ) -> None:
        self._hooks = hooks
        self._pace = pace
        self._cache = cache
        self._paused = paused
        self._preempt = preempt
        self._end = end

    def land(self, planned: PlannedStep, output: StepOutput, now: float) -> OutputsByClient:
        """Append what a step has sampled, publish blocks, and end sequences; returns what clients get."""
        seconds = self._pace.land(planned, now, output.proposing)
        outputs: OutputsByClient = {}
        for arrive in self._hooks.arrive:
            arrive(planned, output)
        number, rows = planned.step.number, planned.step.seqs
        logprobs = output.logprobs or repeat(None, len(rows))
        for seq, row, token, entry in zip(planned.seqs, rows, output.tokens, logprobs, strict=True):
            wanted = seq.land(number, row)
            if not wanted or row.slot in output.failed:
                planned.dropped.add(row.slot)
            if not wanted:
                continue  # it ended after this step was planned, or the step before failed
            if reason := output.failed.get(row.slot):
                code = 400 if reason.startswith(REFUSED_ARGUMENTS) else 503 if reason == QUERY_GONE else 500
                put(outputs, seq, self.fail(seq, code, reason))
                continue
            seq.record.prompt_logprobs += output.prompt_logprobs.get(row.slot, ())
            self._cache.publish(seq, row.start + row.count)
            if row.samples:
                tokens, entries = [token], [] if entry is None else [entry]
                if held := output.held.get(row.slot):
                    tokens = [*held, token]
                    entries = output.held_logprobs.get(row.slot, []) + entries
                for answer in self._append(seq, tokens, entries, now):
                    put(outputs, seq, answer)
            if row.pools:
                vectors = output.pooled[row.slot]
                put(
                    outputs,
                    seq,
                    Pooled(seq.id, vectors, seq.record.cached, seq.record.timing(now), seq.record.expected),
                )
                self._end(seq)
        for land_step in self._hooks.land_step:
            land_step(planned, output, seconds)
        return outputs

    def land_failed(
        self, planned: PlannedStep, now: float, *, short_of_memory: bool, behind: bool
    ) -> OutputsByClient:
        """Let the sequences of a step that failed, but not `behind` another, run apart; one alone ends."""
        self._pace.land(planned, now)
        number, rows = planned.step.number, list(zip(planned.seqs, planned.step.seqs, strict=True))
        again = list(dict.fromkeys([seq for seq, row in rows if seq.land(number, row)]))
        for fail_step in self._hooks.fail_step:
            fail_step(planned, again, behind)
        if not behind and len(again) == 1 and set(planned.seqs) == set(again):
            [seq] = again
            self._end(seq)
            return {seq.key[0]: [(lacks_memory if short_of_memory else quarantined)(seq.id)]}
        self._paused.take_out(again)
        for seq in again:
            self._preempt(seq)
        return {}

    def _append(
        self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprobs], now: float
    ) -> list[Tokens | Failed]:
        """Append the new tokens of a sequence, and end it if one of them ends the text -> the answers.

        What follows a token that ends the text is dropped.
        """
        first = seq.record.first_token is None
        if first:
            seq.record.first_token = now
            self._pace.begin_decoding(seq)
        count, finish, refused = *count_to_end(seq, tokens), ""
        if seq.is_followed:
            for take in self._hooks.take:
                count, finish, refused = take(seq, tokens[:count], finish)
        if not count:
            return [self.fail(seq, 400, refused)]
        seq.tokens += tokens[:count]
        if count > 1:
            seq.computed += count - 1
            self._cache.publish(seq, seq.computed)
        if finish and seq.in_flight:
            self._pace.charge_in_flight(seq)
        answer = Tokens(
            id=seq.key[1],
            tokens=tokens[:count],
            logprobs=logprobs[:count],
            prompt_logprobs=seq.record.prompt_logprobs if first and seq.wants_prompt_logprobs else None,
            cached=seq.record.cached if first else 0,
            finish=finish,
            expected=seq.record.expected if first else None,
        )
        if finish or seq.request.times_each:
            answer = self.report(seq, answer, now)
        if finish:
            self._end(seq)
        return [answer, self.fail(seq, 400, refused)] if refused else [answer]

    def aborted(self, seq: Sequence, now: float) -> Tokens | Failed:
        """The last answer to a request that nobody waits for any more."""
        if seq.pools:
            return Failed(id=seq.id, code=503, message="the request was ended before it was done")
        return self.report(seq, Tokens(id=seq.id, tokens=[], finish="abort"), now)

    def report(self, seq: Sequence, answer: Tokens, now: float) -> Tokens:
        """An answer with the times of its request, and with what features tell."""
        answer = replace(answer, timing=seq.record.timing(now))
        for report in self._hooks.report:
            answer = report(seq, answer)
        return answer

    def fail(self, seq: Sequence, code: int, reason: str) -> Failed:
        """End a sequence that fails; returns its last answer."""
        self._end(seq)
        return Failed(id=seq.id, code=code, message=reason)


def put(outputs: OutputsByClient, seq: Sequence, output: Tokens | Pooled | Failed) -> None:
    outputs.setdefault(seq.key[0], []).append(output)


def count_to_end(seq: Sequence, tokens: list[int]) -> tuple[int, Finish | None]:
    """The number of new tokens up to the one that ends the text, and why it does; all if none does."""
    params, known = seq.request.params, len(seq.tokens)
    for count, token in enumerate(tokens, 1):
        if (
            isinstance(params, Sampling)
            and token in params.stop_token_ids
            and known + count - 1 - seq.prompt_len >= params.min_tokens
        ):
            return count, "stop"
        if known + count >= seq.limit:
            return count, "length"
    return len(tokens), None
