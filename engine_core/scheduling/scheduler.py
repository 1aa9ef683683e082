"""Every decision of an engine: which sequences run, how many of their tokens, and in which blocks.

It uses no torch, no I/O and no clock. There is no prefill phase and no decode phase. A sequence knows some
tokens and has computed some of them; each step closes such gaps, under one budget of tokens for all, and one
of time while somebody reads a stream. Whole prompts, chunks of prompts, cached prefixes, single tokens and
recomputing after a preemption are the same arithmetic. A pooled sequence ends where others get their first
token. If the tokens of a model see what follows them (an encoder), a sequence is computed whole or not at
all, and leaves nothing in a cache.

Steps run in the order in which they were planned, each after the other. Therefore a sequence that has ended
gives up its slot and its blocks at once, even if a step in flight still writes to them: those writes come
before any of the next owner's. And nothing in flight can spoil the prefix cache, because only blocks that
landed steps have filled are ever published, and steps in flight write behind these.

A model in several stages works on as many steps at a time. Its first stage cannot embed a token that the last
one has yet to sample, so a sequence then waits for each of its tokens, and the running sequences are spread
over the steps, each of which leaves some for the next.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from itertools import repeat

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.protocol import Add, Admitted, Failed, Finish, Pooled, Stats, Tokens
from engine_core.scheduling.cache.cache_manager import CacheManager
from engine_core.scheduling.classes import TimeShares, WorkClass
from engine_core.scheduling.pace import Pace
from engine_core.scheduling.request_checks import refusal, token_limit
from engine_core.scheduling.sequence import Key, Sequence
from engine_core.scheduling.stats import Counters
from engine_core.scheduling.step_builder import PlannedStep, StepBuilder
from engine_core.scheduling.waiting import WaitingQueue, order, remove
from worker.protocol import QUERY_GONE, NewSeq, Sampling, SeqStep, StepOutput, TokenLogprobs, WorkerFacts

OutputsByClient = dict[int, list[Admitted | Tokens | Pooled | Failed]]

POLICIES = ("fcfs", "priority")

_WORTH_SAYING = 0.1
"""A request that is expected to wait for so many seconds is told at once."""


class Scheduler:
    """Plans steps for the requests of all clients, and turns what steps bring into outputs."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts, vocab_size: int) -> None:
        _check(config, facts)
        self.counters = Counters()
        self.pace = Pace(config, facts)
        self._by_priority = config.scheduling_policy == "priority"
        self.waiting = WaitingQueue(by_priority=self._by_priority)
        self.running: list[Sequence] = []
        """Sequences with a slot, in scheduling order."""
        self.live: dict[Key, Sequence] = {}
        """All sequences that wait or run."""
        self._config = config
        self._facts = facts
        self._vocab_size = vocab_size
        self._caches = config.enable_prefix_caching and facts.causal
        self._concurrent = config.depth if config.pipeline_parallel_size > 1 else 1
        """Steps that stages work on at the same time, over which sequences are spread."""
        self.cache = CacheManager(facts, caches=self._caches)
        self._shares = TimeShares()

    # Requests come and go.

    def add(self, client: int, request: Add, now: float) -> Admitted | Failed | None:
        """Take a request in, or return why it cannot be. If it will wait for long, returns for how long."""
        key = (client, request.id)
        if key in self.live:
            return Failed(id=request.id, code=400, message="a live request has the same id")
        facts = self._facts
        if reason := refusal(request, facts, self._vocab_size):
            return Failed(id=request.id, code=400, message=reason)
        queued = len(self.waiting) - len(self.cache.free_slots)
        limit = self._config.max_num_queued_reqs
        if limit is not None and queued >= limit:
            return Failed(id=request.id, code=503, message=f"{queued} requests wait already: try again later")
        arrived = request.sent or now  # an engine reads requests between steps
        place, limit = self.waiting.order_of(client, request), token_limit(request, facts)
        seq = Sequence(key, request, place, limit, arrived)
        self.live[key] = seq
        self.pace.enter(seq, self.cache.cached_tokens(seq))
        self.waiting.add(seq)
        seq.expected = now - arrived + self._expected_wait(seq.work_class, now)
        waits = request.streams and seq.expected >= _WORTH_SAYING
        return Admitted(request.id, seq.expected) if waits else None

    def abort(self, keys: Iterable[Key], now: float) -> OutputsByClient:
        """End requests in whatever state they are. Those that have ended already are passed over."""
        outputs: OutputsByClient = {}
        for key in keys:
            if seq := self.live.get(key):
                _put(outputs, seq, _aborted(seq, now))
                self._end(seq)
        return outputs

    # A step is planned.

    def may_plan(self, in_flight: int) -> bool:
        """Whether a step may be planned while so many others are in flight.

        By default a CPU plans ahead only for sequences that decode, which are in every step. Prompts would
        be spread over two steps, which take longer than one with all, and newcomers would wait for both.
        """
        config = self._config
        by_default = config.steps_ahead is None and config.pipeline_parallel_size == 1
        alone = by_default and self._facts.device == "cpu" and not self.pace.decoding
        return in_flight < (1 if alone else config.depth)

    def schedule(self, now: float) -> PlannedStep | None:
        """Plan the next step, or None if nothing can be computed before one in flight has landed."""
        step = StepBuilder(self._config, self._facts, self.pace.line)
        held_back = self._preempt_for_priority()
        # Single tokens come first: a prompt delays nobody's next token by more than its chunk.
        decodes: list[Sequence] = []
        prefills: dict[WorkClass, list[Sequence]] = {each: [] for each in WorkClass}
        for seq in self._runnable():
            if seq is not held_back and (gap := seq.gap):
                first = gap == 1 and seq.work_class != WorkClass.BACKGROUND
                (decodes if first else prefills[seq.work_class]).append(seq)
        for seq in decodes[: self._per_step(len(self.running))]:
            if step.budget and seq.slot is not None:
                self._continue(seq, step)
        self.pace.bound(step)
        self._fill(step, prefills, now)
        planned = step.finish(self.counters.steps + 1)
        if planned is not None:
            self.counters.steps += 1
            self.counters.step_tokens += self._facts.max_num_batched_tokens - step.budget
            self.pace.plan(planned, now)
        return planned

    def _fill(self, step: StepBuilder, prefills: dict[WorkClass, list[Sequence]], now: float) -> None:
        """Give what is left of a step to prompts and texts, class by class in turn."""
        most_running, most = self._per_step(len(self.running)), self._per_step(len(self.live))
        waiting = self.waiting.classes()
        classes = waiting | {each for each, running in prefills.items() if running}
        self._shares.begin_step(classes)
        while classes and not step.full:
            turn = self._shares.whose_turn(classes)
            if prefills[turn]:
                seq = prefills[turn].pop(0)
                if step.rows < most_running and seq.slot is not None:
                    self._shares.charge(turn, self._continue(seq, step))
            elif turn not in waiting or step.rows >= most or (seq := self.waiting.first(turn)) is None:
                classes = classes - {turn}
            elif (prefix := self.cache.match(seq)) is None:
                waiting = set()  # what came later must not take the memory that this one waits for
            elif (cost := self._admit(seq, prefix, step, now)) is None:
                waiting = waiting - {turn}
            else:
                self._shares.charge(turn, cost)

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
        if not self._by_priority:
            return None
        first = self.waiting.best()
        while first and self.running and self.cache.match(first) is None:
            victim = self.running[-1]
            if victim.request.priority <= first.request.priority:
                return None
            if victim.in_flight:
                return victim
            self._preempt(victim)
        return None

    def _continue(self, seq: Sequence, step: StepBuilder) -> float:
        """Add a row for a running sequence, if it fits; returns the seconds that it takes."""
        count = step.chunk(seq.gap, seq.computed, alone=len(self.running) == 1)
        before = len(seq.blocks)
        fits = count and step.can_pool(seq, ends=count == seq.gap)
        if not fits or not self._grow(seq, seq.computed + count):
            return 0.0
        return step.add(seq, count, seq.blocks[before:])

    def _admit(self, seq: Sequence, prefix: list[int], step: StepBuilder, now: float) -> float | None:
        """Add a row for a waiting sequence, which runs from now on, if it fits; returns its seconds."""
        start = len(prefix) * self._facts.block_size
        gap = seq.gap - start
        count = step.chunk(gap, start, alone=not self.running)
        if not count or (count < gap and not step.may_split) or not step.can_pool(seq, ends=count == gap):
            return None
        self.waiting.admit(seq)
        insort(self.running, seq, key=order)
        slot = self.cache.admit(seq, prefix)
        self.cache.grow(seq, seq.computed + count)
        step.add_new(self._new_seq(seq, slot, now))
        return step.add(seq, count, list(seq.blocks))

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
        self.pace.enter(seq, 0)
        self.waiting.add(seq)

    def _release(self, seq: Sequence) -> None:
        """Stop running a sequence: its slot and its blocks are free at once."""
        remove(self.running, seq)
        self.cache.release(seq)

    # A step lands.

    def update(self, planned: PlannedStep, output: StepOutput, now: float) -> OutputsByClient:
        """Append what a step has sampled, publish blocks, and end sequences; returns what clients get."""
        self.pace.land(planned, now)
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
                timing = seq.timing(now)
                pooled = Pooled(seq.key[1], vectors, seq.cached, timing, seq.expected, seq.miss)
                _put(outputs, seq, pooled)
                self._end(seq)
        return outputs

    def fail(self, planned: PlannedStep, message: str, now: float) -> OutputsByClient:
        """End all sequences of a step that broke, because nothing that it computed can be used."""
        self.pace.land(planned, now)
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
            self.pace.begin_decoding(seq)
        seq.tokens.append(token)
        finish = _finish(seq, token)
        if finish and seq.in_flight:
            self.pace.charge_in_flight(seq)
        tokens = Tokens(
            id=seq.key[1],
            tokens=[token],
            logprobs=[] if logprobs is None else [logprobs],
            prompt_logprobs=seq.prompt_logprobs if owes_prompt_logprobs else None,
            cached=seq.cached if first else 0,
            miss=seq.miss if first else None,
            finish=finish,
            timing=seq.timing(now) if finish or seq.request.times_each else None,
            expected=seq.expected if first else None,
        )
        if finish:
            self._end(seq)
        return tokens

    def _end(self, seq: Sequence) -> None:
        self.pace.leave(seq)
        seq.done = True
        del self.live[seq.key]
        if seq.slot is None:
            self.waiting.remove(seq)
        else:
            self._release(seq)

    # Statistics.

    def _expected_wait(self, work_class: WorkClass, now: float) -> float:
        pools = work_class is WorkClass.POOLING  # texts end with the step that completes them
        short = 0 if pools else len(self.waiting) - len(self.cache.free_slots)
        return self.pace.expected_wait(work_class, short, self.running, now)

    def stats(self, now: float) -> Stats:
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
            busy=self.pace.busy,
            expected_wait=self._expected_wait(WorkClass.FIRST_TOKEN, now),
        )


def _check(config: EngineConfig, facts: WorkerFacts) -> None:
    if config.steps_ahead is not None and config.steps_ahead < 0:
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
