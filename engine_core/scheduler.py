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
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat

from msgspec.structs import replace

from engine_core.admission import blocks_needed, refusal, token_limit
from engine_core.blocks import BlockPool
from engine_core.config import EngineConfig
from engine_core.protocol import Add, Failed, Finish, Pooled, Stats, Tokens
from engine_core.sequence import Key, Sequence
from engine_core.stats import Counters
from worker.protocol import (
    QUERY_GONE,
    NewSeq,
    Pooling,
    Sampling,
    SeqStep,
    StepInput,
    StepOutput,
    TokenLogprobs,
    WorkerFacts,
)

Outputs = dict[int, list[Tokens | Pooled | Failed]]
"""What there is to tell, by server."""

POLICIES = ("fcfs", "priority")


@dataclass(slots=True)
class Plan:
    """A step, and the sequence of each of its rows."""

    step: StepInput
    seqs: list[Sequence]


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    left: int  # tokens of the budget
    reads: bool = False  # some row takes several tokens
    pooled: int = 0  # hidden states, of this step and of earlier ones, that its pooled sequences need
    new: list[NewSeq] = field(default_factory=list)
    rows: list[SeqStep] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)


class Scheduler:
    def __init__(self, config: EngineConfig, facts: WorkerFacts, vocab_size: int) -> None:
        _check(config, facts)
        self.counters = Counters()
        self.pool = BlockPool(facts.num_blocks)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both in order of rank."""
        self.live: dict[Key, Sequence] = {}
        """All that wait or run."""
        self.free_slots = list(reversed(range(facts.max_num_seqs)))
        self._config = config
        self._facts = facts
        self._vocab_size = vocab_size
        self._by_priority = config.scheduling_policy == "priority"
        self._caches = config.enable_prefix_caching and facts.causal
        self._chunks = config.enable_chunked_prefill and facts.causal
        self._max_pooled = max(facts.max_num_batched_tokens, facts.max_model_len)
        self._arrivals = 0

    # Requests come and go.

    def add(self, client: int, request: Add, now: float) -> Failed | None:
        key = (client, request.id)
        if key in self.live:
            return Failed(id=request.id, code=400, message="a live request has the same id")
        if reason := refusal(request, self._facts, self._vocab_size):
            return Failed(id=request.id, code=400, message=reason)
        queued = len(self.waiting) - len(self.free_slots)
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
        draft = _Draft(left=self._facts.max_num_batched_tokens)
        held_back = self._make_way()
        # Prompts come after single tokens: a long prompt delays nobody's next token by more than its chunk.
        decoding = [seq for seq in self.running if seq.want == 1]
        reading = [seq for seq in self.running if seq.want > 1]
        for seq in decoding + reading:
            if draft.left and seq is not held_back and seq.slot is not None:
                self._continue(seq, draft)
        while self.waiting and draft.left and self._admit(self.waiting[0], draft, now):
            pass
        if not draft.rows:
            return None
        self.counters.steps += 1
        self.counters.step_tokens += self._facts.max_num_batched_tokens - draft.left
        return Plan(StepInput(self.counters.steps, draft.new, draft.rows), draft.seqs)

    def _make_way(self) -> Sequence | None:
        """Under the priority policy, lower priorities that run give way to a higher one that waits.

        One that is in flight cannot be preempted, as its newest token is not known yet. It is returned, to be
        left out of this step, and can be preempted when it has landed.
        """
        if not self._by_priority or not self.waiting:
            return None
        first = self.waiting[0]
        while self.running and self._room(first) is None:
            victim = self.running[-1]
            if victim.request.priority <= first.request.priority:
                return None
            if victim.inflight:
                return victim
            self._preempt(victim)
        return None

    def _continue(self, seq: Sequence, draft: _Draft) -> None:
        count = self._chunk(seq.want, draft.left, alone=len(self.running) == 1)
        before = len(seq.blocks)
        if self._can_pool(seq, count == seq.want, draft) and self._grow(seq, seq.computed + count):
            self._plan(seq, count, seq.blocks[before:], draft)

    def _admit(self, seq: Sequence, draft: _Draft, now: float) -> bool:
        """Let the first of those who wait run, if there is room for it."""
        shared = self._room(seq)
        if shared is None:
            return False
        want = seq.want - len(shared) * self._facts.block_size
        count = self._chunk(want, draft.left, alone=not self.running)
        if count < want and not self._may_cut(seq, draft):
            return False
        if not self._can_pool(seq, count == want, draft):
            return False
        self.waiting.pop(0)
        insort(self.running, seq, key=_rank)
        self.pool.share(shared)
        seq.blocks = shared
        seq.published = len(shared)
        seq.computed = len(shared) * self._facts.block_size
        seq.slot = self.free_slots.pop()
        self._grow(seq, seq.computed + count)
        draft.new.append(self._enter(seq, seq.slot, now))
        self._plan(seq, count, list(seq.blocks), draft)
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

    def _plan(self, seq: Sequence, count: int, new_blocks: list[int], draft: _Draft) -> None:
        if seq.slot is None:
            raise RuntimeError(f"sequence {seq.key} was planned without a row")
        known = len(seq.tokens) + seq.pending
        start, ends = seq.computed, seq.computed + count == known
        samples, pools = ends and not seq.pools, ends and seq.pools
        draft.rows.append(SeqStep(seq.slot, start, count, new_blocks, samples, known - seq.prompt_len, pools))
        draft.seqs.append(seq)
        draft.left -= count
        draft.reads |= count > 1
        draft.pooled += self._pooled_rows(seq) if pools else 0
        seq.computed += count
        seq.pending += samples
        seq.inflight += 1

    def _chunk(self, want: int, left: int, *, alone: bool) -> int:
        """How many of the tokens it wants a sequence gets in this step."""
        longest = self._config.long_prefill_token_threshold
        if longest and not alone and self._chunks:
            want = min(want, longest)
        return min(want, left)

    def _may_cut(self, seq: Sequence, draft: _Draft) -> bool:
        """A text to be pooled is not cut for others that are read: its last digits would depend on them.

        Beside single tokens it may be, or it might wait for ever.
        """
        return self._chunks and not (seq.pools and draft.reads)

    def _can_pool(self, seq: Sequence, ends: bool, draft: _Draft) -> bool:
        """Cached beginnings cost no budget, but pooling many of them together would take much memory."""
        if not (ends and seq.pools and draft.pooled):
            return True
        return draft.pooled + self._pooled_rows(seq) <= self._max_pooled

    def _pooled_rows(self, seq: Sequence) -> int:
        params = seq.request.params
        return seq.prompt_len if isinstance(params, Pooling) and params.task in self._facts.whole_tasks else 1

    # Blocks.

    def _room(self, seq: Sequence) -> list[int] | None:
        """The cached blocks with which a waiting sequence could start now, or None if it cannot.

        There must be room for all it knows, not for its first chunk only: else it would be admitted into a
        full cache again and again, only to be preempted.
        """
        if not self.free_slots:
            return None
        shared = self._cached(seq)
        unused = sum(not self.pool.users(block) for block in shared)
        new = blocks_needed(len(seq.tokens), self._facts) - len(shared)
        return shared if new + unused <= self.pool.free else None

    def _cached(self, seq: Sequence) -> list[int]:
        """The blocks of its beginning that are in the cache. One token at least is left to compute."""
        blocks: list[int] = []
        if not self._caches or seq.tells_prompt:
            return blocks
        size = self._facts.block_size
        for index in range((len(seq.tokens) - 1) // size):
            block = self.pool.find(seq.block_hash(index, size))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _grow(self, seq: Sequence, positions: int) -> bool:
        """Give it blocks for so many positions, if need be those of sequences that rank behind it."""
        need = blocks_needed(positions, self._facts) - len(seq.blocks)
        while need > self.pool.free:
            victim = next((other for other in reversed(self.running) if not other.inflight), None)
            if victim is None or victim.rank <= seq.rank:
                return False
            self._preempt(victim)
        if need > 0:
            seq.blocks += self.pool.take(need, after=seq.blocks[-1] if seq.blocks else None)
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
        """Give up row and blocks."""
        if seq.slot is None:
            return
        _remove(self.running, seq)
        self.free_slots.append(seq.slot)
        self.pool.release(seq.blocks)
        seq.slot, seq.blocks, seq.published = None, [], 0

    def _publish(self, seq: Sequence, landed: int) -> None:
        size = self._facts.block_size
        while self._caches and seq.published < landed // size:
            index = seq.published
            self.pool.publish(seq.blocks[index], seq.block_hash(index, size))
            seq.published += 1

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
            self._publish(seq, row.start + row.count)
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
        self._leave(seq)

    # What can be seen from outside.

    def stats(self) -> Stats:
        counters = self.counters
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=self.pool.usage,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            steps=counters.steps,
            step_tokens=counters.step_tokens,
        )


def _check(config: EngineConfig, facts: WorkerFacts) -> None:
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
