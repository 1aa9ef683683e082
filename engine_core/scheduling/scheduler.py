"""Who runs, how many tokens, in which blocks: every decision of an engine. No torch, no I/O, no clock.

There is no prefill phase and no decode phase. A sequence knows some tokens and has computed some of them;
each step closes gaps, under one budget of tokens for all. Whole prompts, chunks of prompts, cached
beginnings, single tokens and re-reading after a preemption are the same arithmetic. A sequence that is pooled
ends where others get their first token. Of a model whose tokens see what follows them, a sequence is computed
whole or not at all, and leaves nothing in a cache.

Steps run in the order in which they were planned, each after the other. Therefore a sequence that has
ended gives up its row and its blocks at once, even if a step that still writes to them has not landed:
those writes come before any of the next owner's. And nothing in flight can spoil the prefix cache,
because only blocks whose positions have all landed are ever published, and steps in flight write behind
these.

A model in several stages works on as many steps at a time. Its first stage cannot embed a token that the last
one has yet to sample, so a sequence then waits for each of its tokens, and those that run are spread over the
steps, each of which leaves some for the next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import repeat

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.protocol import Add, Failed, Finish, Pooled, Stats, Tokens
from engine_core.scheduling.cache import Room
from engine_core.scheduling.request_checks import refusal, token_limit
from engine_core.scheduling.sequence import Key, Sequence
from engine_core.scheduling.stats import Counters
from engine_core.scheduling.step import Draft, Plan
from worker.protocol import QUERY_GONE, NewSeq, Sampling, SeqStep, StepOutput, TokenLogprobs, WorkerFacts

Outputs = dict[int, list[Tokens | Pooled | Failed]]
"""What there is to tell, by server."""

POLICIES = ("fcfs", "priority")


class Scheduler:
    def __init__(self, config: EngineConfig, facts: WorkerFacts, vocab_size: int) -> None:
        _check(config, facts)
        self.counters = Counters()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both in order of rank."""
        self.live: dict[Key, Sequence] = {}
        """All that wait or run."""
        self._config = config
        self._facts = facts
        self._vocab_size = vocab_size
        self._by_priority = config.scheduling_policy == "priority"
        self._caches = config.enable_prefix_caching and facts.causal
        self._turns = config.depth if config.pipeline_parallel_size > 1 else 1
        """Steps that run at the same time, over which sequences are spread."""
        self.room = Room(facts, caches=self._caches)
        self._arrivals = 0

    # Requests come and go.

    def add(self, client: int, request: Add, now: float) -> Failed | None:
        key = (client, request.id)
        if key in self.live:
            return Failed(id=request.id, code=400, message="a live request has the same id")
        if reason := refusal(request, self._facts, self._vocab_size):
            return Failed(id=request.id, code=400, message=reason)
        queued = len(self.waiting) - len(self.room.free_slots)
        limit = self._config.max_num_queued_reqs
        if limit is not None and queued >= limit:
            return Failed(id=request.id, code=503, message=f"{queued} requests wait already: try again later")
        self._arrivals += 1
        rank = (request.priority if self._by_priority else 0, self._arrivals)
        seq = Sequence(key, request, rank, token_limit(request, self._facts), now)
        self.live[key] = seq
        insort(self.waiting, seq, key=_rank)
        return None

    def abort(self, keys: Iterable[Key], now: float) -> Outputs:
        """Whatever state they are in. Those that have ended already are passed over."""
        outputs: Outputs = {}
        for key in keys:
            if seq := self.live.get(key):
                _tell(outputs, seq, _aborted(seq, now))
                self._end(seq)
        return outputs

    # A step is planned.

    def schedule(self, now: float) -> Plan | None:
        """The next step, or None if nothing can be computed before one in flight has landed."""
        draft = Draft(self._config, self._facts)
        held_back = self._make_way()
        most = self._share(len(self.live))
        # Prompts come after single tokens: a long prompt delays nobody's next token by more than its chunk.
        ready = self._ready()
        decoding = [seq for seq in ready if seq.want == 1]
        reading = [seq for seq in ready if seq.want > 1]
        for seq in (decoding + reading)[: self._share(len(self.running))]:
            if draft.left and seq is not held_back and seq.slot is not None:
                self._continue(seq, draft)
        while self.waiting and draft.left and draft.rows < most and self._admit(self.waiting[0], draft, now):
            pass
        plan = draft.plan(self.counters.steps + 1)
        if plan is not None:
            self.counters.steps += 1
            self.counters.step_tokens += self._facts.max_num_batched_tokens - draft.left
        return plan

    def _ready(self) -> list[Sequence]:
        """Those that run and can take part in another step."""
        return self.running if self._turns == 1 else [seq for seq in self.running if not seq.pending]

    def _share(self, sequences: int) -> int:
        """How many of so many one step takes."""
        return -(-sequences // self._turns)

    def _make_way(self) -> Sequence | None:
        """Under the priority policy, lower priorities that run give way to a higher one that waits.

        One that is in flight cannot be preempted, as its newest token is not known yet. It is returned, to be
        left out of this step, and can be preempted when it has landed.
        """
        if not self._by_priority or not self.waiting:
            return None
        first = self.waiting[0]
        while self.running and self.room.look(first) is None:
            victim = self.running[-1]
            if victim.request.priority <= first.request.priority:
                return None
            if victim.inflight:
                return victim
            self._preempt(victim)
        return None

    def _continue(self, seq: Sequence, draft: Draft) -> None:
        count = draft.chunk(seq.want, alone=len(self.running) == 1)
        before = len(seq.blocks)
        if draft.can_pool(seq, ends=count == seq.want) and self._grow(seq, seq.computed + count):
            draft.add(seq, count, seq.blocks[before:])

    def _admit(self, seq: Sequence, draft: Draft, now: float) -> bool:
        """Let the first of those who wait run, if there is room for it."""
        shared = self.room.look(seq)
        if shared is None:
            return False
        want = seq.want - len(shared) * self._facts.block_size
        count = draft.chunk(want, alone=not self.running)
        if count < want and not draft.may_cut(seq):
            return False
        if not draft.can_pool(seq, ends=count == want):
            return False
        self.waiting.pop(0)
        insort(self.running, seq, key=_rank)
        slot = self.room.enter(seq, shared)
        self.room.grow(seq, seq.computed + count)
        draft.bring(self._enter(seq, slot, now))
        draft.add(seq, count, list(seq.blocks))
        return True

    def _enter(self, seq: Sequence, slot: int, now: float) -> NewSeq:
        params = seq.request.params
        if seq.started is None:
            seq.started = now
            seq.cached = seq.computed
            if self._caches:
                self.counters.prefix_queries += seq.prompt_len
                self.counters.prefix_hits += seq.cached
        elif isinstance(params, Sampling) and not seq.tells_prompt:
            params = replace(params, prompt_logprobs=None)  # told before it was preempted
        return NewSeq(slot, list(seq.tokens), seq.prompt_len, params)

    def _grow(self, seq: Sequence, positions: int) -> bool:
        """Give it blocks for so many positions, if need be those of sequences that rank behind it."""
        while not self.room.grow(seq, positions):
            victim = next((other for other in reversed(self.running) if not other.inflight), None)
            if victim is None or victim.rank <= seq.rank:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to those who wait. Its tokens are kept, and read again when it is admitted again."""
        self._leave(seq)
        seq.computed = 0
        seq.prompt_logprobs = []
        seq.preemptions += 1
        self.counters.preemptions += 1
        insort(self.waiting, seq, key=_rank)

    def _leave(self, seq: Sequence) -> None:
        """It runs no more: row and blocks are free at once."""
        _remove(self.running, seq)
        self.room.leave(seq)

    # A step lands.

    def update(self, plan: Plan, output: StepOutput, now: float) -> Outputs:
        outputs: Outputs = {}
        logprobs = output.logprobs or repeat(None, len(plan.seqs))
        for seq, row, token, entry in zip(plan.seqs, plan.step.seqs, output.tokens, logprobs, strict=True):
            _land(seq, row)
            if seq.done:
                continue  # it ended after this step was planned: the row was in vain
            if reason := output.failed.get(row.slot):
                code = 503 if reason == QUERY_GONE else 500
                _tell(outputs, seq, Failed(id=seq.key[1], code=code, message=reason))
                self._end(seq)
                continue
            seq.prompt_logprobs += output.prompt_logprobs.get(row.slot, ())
            self.room.publish(seq, row.start + row.count)
            if row.samples:
                _tell(outputs, seq, self._accept(seq, token, entry, now))
            if row.pools:
                vectors = output.pooled[row.slot]
                _tell(outputs, seq, Pooled(seq.key[1], vectors, seq.cached, seq.timing(now)))
                self._end(seq)
        return outputs

    def fail(self, plan: Plan, message: str) -> Outputs:
        """The step broke: nothing that it computed can be used."""
        outputs: Outputs = {}
        for seq, row in zip(plan.seqs, plan.step.seqs, strict=True):
            _land(seq, row)
            if not seq.done:
                _tell(outputs, seq, Failed(id=seq.key[1], code=500, message=message))
                self._end(seq)
        return outputs

    def _accept(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> Tokens:
        first, tells_prompt = seq.first_token is None, seq.tells_prompt
        if first:
            seq.first_token = now
        seq.tokens.append(token)
        finish = _finish(seq, token)
        tokens = Tokens(
            id=seq.key[1],
            tokens=[token],
            logprobs=[] if logprobs is None else [logprobs],
            prompt_logprobs=seq.prompt_logprobs if tells_prompt else None,
            cached=seq.cached if first else 0,
            finish=finish,
            timing=seq.timing(now) if finish else None,
        )
        if finish:
            self._end(seq)
        return tokens

    def _end(self, seq: Sequence) -> None:
        seq.done = True
        del self.live[seq.key]
        if seq.slot is None:
            _remove(self.waiting, seq)
        else:
            self._leave(seq)

    # What can be seen from outside.

    def stats(self) -> Stats:
        counters = self.counters
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=self.room.pool.usage,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            steps=counters.steps,
            step_tokens=counters.step_tokens,
        )


def _check(config: EngineConfig, facts: WorkerFacts) -> None:
    if config.steps_ahead < 0:
        raise ValueError(f"steps_ahead is {config.steps_ahead}; it must be 0 or more")
    if config.scheduling_policy not in POLICIES:
        raise ValueError(
            f"scheduling_policy is '{config.scheduling_policy}'; it can be {' or '.join(POLICIES)}"
        )
    if (
        not (config.enable_chunked_prefill and facts.causal)
        and facts.max_num_batched_tokens < facts.max_model_len
    ):
        raise ValueError(
            f"without chunked prefill a step must hold a whole prompt: set --max-num-batched-tokens (now "
            f"{facts.max_num_batched_tokens}) to at least --max-model-len ({facts.max_model_len})"
        )


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


def _remove(ranked: list[Sequence], seq: Sequence) -> None:
    del ranked[bisect_left(ranked, seq.rank, key=_rank)]


def _aborted(seq: Sequence, now: float) -> Tokens | Failed:
    if seq.pools:
        return Failed(id=seq.key[1], code=503, message="the request was ended before it was done")
    return Tokens(id=seq.key[1], tokens=[], finish="abort", timing=seq.timing(now))


def _tell(outputs: Outputs, seq: Sequence, output: Tokens | Pooled | Failed) -> None:
    outputs.setdefault(seq.key[0], []).append(output)


def _land(seq: Sequence, row: SeqStep) -> None:
    seq.inflight -= 1
    seq.pending -= row.samples


def _finish(seq: Sequence, token: int) -> Finish | None:
    """Whether the token just appended ends the text."""
    params = seq.request.params
    outputs_before = len(seq.tokens) - 1 - seq.prompt_len
    if (
        isinstance(params, Sampling)
        and token in params.stop_token_ids
        and outputs_before >= params.min_tokens
    ):
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None
