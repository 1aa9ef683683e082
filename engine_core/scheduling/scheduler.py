"""Every decision of an engine: which sequences run, how many of their tokens, and in which blocks.

It uses no torch, no I/O and no clock. There is no prefill phase and no decode phase. A sequence knows some
tokens and has computed some of them; each step closes such gaps, under one budget of tokens for all. Whole
prompts, chunks of prompts, cached prefixes, single tokens and recomputing after a preemption are the same
arithmetic. A pooled sequence ends where others get their first token. If the tokens of a model see what
follows them (an encoder), a sequence is computed whole or not at all, and leaves nothing in a cache.

Steps run in the order in which they were planned, each after the other. Therefore a sequence that has ended
gives up its slot and its blocks at once, even if a step in flight still writes to them: those writes come
before any of the next owner's. And nothing in flight can spoil the prefix cache, because only blocks that
landed steps have filled are ever published, and steps in flight write behind these.

A model in several stages works on as many steps at a time. Its first stage cannot embed a token that the last
one has yet to sample, so a sequence then waits for each of its tokens, and the running sequences are spread
over the steps, each of which leaves some for the next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import repeat

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.protocol import Add, Admitted, Failed, Finish, Pooled, Stats, Tokens
from engine_core.scheduling.cache_manager import CacheManager
from engine_core.scheduling.request_checks import refusal, token_limit
from engine_core.scheduling.sequence import Key, Sequence
from engine_core.scheduling.stats import Counters
from engine_core.scheduling.step_builder import PlannedStep, StepBuilder
from worker.protocol import QUERY_GONE, NewSeq, Sampling, SeqStep, StepOutput, TokenLogprobs, WorkerFacts

OutputsByClient = dict[int, list[Admitted | Tokens | Pooled | Failed]]

POLICIES = ("fcfs", "priority")


class Scheduler:
    """Plans steps for the requests of all clients, and turns what steps bring into outputs."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts, vocab_size: int) -> None:
        _check(config, facts)
        self.counters = Counters()
        self.waiting: list[Sequence] = []
        """Sequences without a slot, in scheduling order."""
        self.running: list[Sequence] = []
        """Sequences with a slot, in scheduling order."""
        self.live: dict[Key, Sequence] = {}
        """All sequences that wait or run."""
        self._config = config
        self._facts = facts
        self._vocab_size = vocab_size
        self._by_priority = config.scheduling_policy == "priority"
        self._caches = config.enable_prefix_caching and facts.causal
        self._concurrent = config.depth if config.pipeline_parallel_size > 1 else 1
        """Steps that stages work on at the same time, over which sequences are spread."""
        self.cache = CacheManager(facts, caches=self._caches)
        self._arrivals = 0

    # Requests come and go.

    def add(self, client: int, request: Add, now: float) -> Failed | None:
        """Take a request in, or return why it cannot be."""
        key = (client, request.id)
        if key in self.live:
            return Failed(id=request.id, code=400, message="a live request has the same id")
        if reason := refusal(request, self._facts, self._vocab_size):
            return Failed(id=request.id, code=400, message=reason)
        queued = len(self.waiting) - len(self.cache.free_slots)
        limit = self._config.max_num_queued_reqs
        if limit is not None and queued >= limit:
            return Failed(id=request.id, code=503, message=f"{queued} requests wait already: try again later")
        self._arrivals += 1
        order = (request.priority if self._by_priority else 0, self._arrivals)
        seq = Sequence(key, request, order, token_limit(request, self._facts), now)
        self.live[key] = seq
        insort(self.waiting, seq, key=_order)
        return None

    def abort(self, keys: Iterable[Key], now: float) -> OutputsByClient:
        """End requests in whatever state they are. Those that have ended already are passed over."""
        outputs: OutputsByClient = {}
        for key in keys:
            if seq := self.live.get(key):
                _put(outputs, seq, _aborted(seq, now))
                self._end(seq)
        return outputs

    # A step is planned.

    def schedule(self, now: float) -> PlannedStep | None:
        """Plan the next step, or None if nothing can be computed before one in flight has landed."""
        step = StepBuilder(self._config, self._facts)
        held_back = self._preempt_for_priority()
        most = self._per_step(len(self.live))
        # Prompts come after single tokens: a long prompt delays nobody's next token by more than its chunk.
        runnable = self._runnable()
        decodes = [seq for seq in runnable if seq.gap == 1]
        prefills = [seq for seq in runnable if seq.gap > 1]
        for seq in (decodes + prefills)[: self._per_step(len(self.running))]:
            if step.budget and seq is not held_back and seq.slot is not None:
                self._continue(seq, step)
        while self.waiting and step.budget and step.rows < most and self._admit(self.waiting[0], step, now):
            pass
        planned = step.finish(self.counters.steps + 1)
        if planned is not None:
            self.counters.steps += 1
            self.counters.step_tokens += self._facts.max_num_batched_tokens - step.budget
        return planned

    def _runnable(self) -> list[Sequence]:
        """The running sequences that can take part in another step now."""
        return self.running if self._concurrent == 1 else [seq for seq in self.running if not seq.pending]

    def _per_step(self, sequences: int) -> int:
        """The share of so many sequences that one step takes."""
        return -(-sequences // self._concurrent)

    def _preempt_for_priority(self) -> Sequence | None:
        """Under the priority policy, preempt running sequences for a waiting one of higher priority.

        A sequence in flight cannot be preempted, as its newest token is not known yet. It is returned, to be
        left out of this step, and can be preempted when its step has landed.
        """
        if not self._by_priority or not self.waiting:
            return None
        first = self.waiting[0]
        while self.running and self.cache.match(first) is None:
            victim = self.running[-1]
            if victim.request.priority <= first.request.priority:
                return None
            if victim.in_flight:
                return victim
            self._preempt(victim)
        return None

    def _continue(self, seq: Sequence, step: StepBuilder) -> None:
        """Add a row for a running sequence, if there are blocks for it."""
        count = step.chunk(seq.gap, alone=len(self.running) == 1)
        before = len(seq.blocks)
        if step.can_pool(seq, ends=count == seq.gap) and self._grow(seq, seq.computed + count):
            step.add(seq, count, seq.blocks[before:])

    def _admit(self, seq: Sequence, step: StepBuilder, now: float) -> bool:
        """Add a row for the first waiting sequence, which runs from now on; False if it does not fit."""
        prefix = self.cache.match(seq)
        if prefix is None:
            return False
        gap = seq.gap - len(prefix) * self._facts.block_size
        count = step.chunk(gap, alone=not self.running)
        if count < gap and not step.may_split(seq):
            return False
        if not step.can_pool(seq, ends=count == gap):
            return False
        self.waiting.pop(0)
        insort(self.running, seq, key=_order)
        slot = self.cache.admit(seq, prefix)
        self.cache.grow(seq, seq.computed + count)
        step.add_new(self._new_seq(seq, slot, now))
        step.add(seq, count, list(seq.blocks))
        return True

    def _new_seq(self, seq: Sequence, slot: int, now: float) -> NewSeq:
        """The message with which a sequence enters its slot in the worker."""
        params = seq.request.params
        if seq.started is None:
            seq.started = now
            seq.cached = seq.computed
            if self._caches:
                self.counters.prefix_queries += seq.prompt_len
                self.counters.prefix_hits += seq.cached
        elif isinstance(params, Sampling) and not seq.owes_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)  # they were sent before it was preempted
        return NewSeq(slot, list(seq.tokens), seq.prompt_len, params)

    def _grow(self, seq: Sequence, positions: int) -> bool:
        """Give a sequence blocks for so many positions; if need be, preempt sequences that come after it."""
        while not self.cache.grow(seq, positions):
            victim = next((other for other in reversed(self.running) if not other.in_flight), None)
            if victim is None or victim.order <= seq.order:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Let a running sequence wait again. Its tokens are kept, and computed again when it is admitted."""
        self._release(seq)
        seq.computed = 0
        seq.prompt_logprobs = []
        seq.preemptions += 1
        self.counters.preemptions += 1
        insort(self.waiting, seq, key=_order)

    def _release(self, seq: Sequence) -> None:
        """Stop running a sequence: its slot and its blocks are free at once."""
        _remove(self.running, seq)
        self.cache.release(seq)

    # A step lands.

    def update(self, planned: PlannedStep, output: StepOutput, now: float) -> OutputsByClient:
        """Append what a step has sampled, publish blocks, and end sequences; returns what clients get."""
        outputs: OutputsByClient = {}
        rows = planned.step.seqs
        logprobs = output.logprobs or repeat(None, len(rows))
        for seq, row, token, entry in zip(planned.seqs, rows, output.tokens, logprobs, strict=True):
            _land(seq, row)
            if seq.done:
                continue  # it ended after this step was planned: the row is dropped
            if reason := output.failed.get(row.slot):
                code = 503 if reason == QUERY_GONE else 500
                _put(outputs, seq, Failed(id=seq.key[1], code=code, message=reason))
                self._end(seq)
                continue
            seq.prompt_logprobs += output.prompt_logprobs.get(row.slot, ())
            self.cache.publish(seq, row.start + row.count)
            if row.samples:
                _put(outputs, seq, self._append(seq, token, entry, now))
            if row.pools:
                vectors = output.pooled[row.slot]
                _put(outputs, seq, Pooled(seq.key[1], vectors, seq.cached, seq.timing(now)))
                self._end(seq)
        return outputs

    def fail(self, planned: PlannedStep, message: str) -> OutputsByClient:
        """End all sequences of a step that broke, because nothing that it computed can be used."""
        outputs: OutputsByClient = {}
        for seq, row in zip(planned.seqs, planned.step.seqs, strict=True):
            _land(seq, row)
            if not seq.done:
                _put(outputs, seq, Failed(id=seq.key[1], code=500, message=message))
                self._end(seq)
        return outputs

    def _append(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> Tokens:
        """Append a sampled token, and end the sequence if it is the last; returns what the client gets."""
        first, owes_prompt_logprobs = seq.first_token is None, seq.owes_prompt_logprobs
        if first:
            seq.first_token = now
        seq.tokens.append(token)
        finish = _finish(seq, token)
        tokens = Tokens(
            id=seq.key[1],
            tokens=[token],
            logprobs=[] if logprobs is None else [logprobs],
            prompt_logprobs=seq.prompt_logprobs if owes_prompt_logprobs else None,
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
            self._release(seq)

    # Statistics.

    def stats(self) -> Stats:
        counters = self.counters
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=self.cache.pool.usage,
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


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order


def _remove(ordered: list[Sequence], seq: Sequence) -> None:
    del ordered[bisect_left(ordered, seq.order, key=_order)]


def _aborted(seq: Sequence, now: float) -> Tokens | Failed:
    if seq.pools:
        return Failed(id=seq.key[1], code=503, message="the request was ended before it was done")
    return Tokens(id=seq.key[1], tokens=[], finish="abort", timing=seq.timing(now))


def _put(outputs: OutputsByClient, seq: Sequence, output: Tokens | Pooled | Failed) -> None:
    outputs.setdefault(seq.key[0], []).append(output)


def _land(seq: Sequence, row: SeqStep) -> None:
    """Note that a row of a step in flight has landed."""
    seq.in_flight -= 1
    seq.pending -= row.samples


def _finish(seq: Sequence, token: int) -> Finish | None:
    """The reason for which the token just appended is the last one, or None if it is not."""
    params = seq.request.params
    outputs_before = len(seq.tokens) - 1 - seq.prompt_len
    if (
        isinstance(params, Sampling)
        and token in params.stop_token_ids
        and outputs_before >= params.min_tokens
    ):
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None
