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

from engine_core.config import EngineConfig
from engine_core.engine_stats import Stats
from engine_core.protocol import AddRequest, Admitted, Failed, OutputsByClient, Tokens
from engine_core.scheduling.cache.cache_manager import CacheManager, Prefix
from engine_core.scheduling.feature import Hooks
from engine_core.scheduling.first_token_forecast import Slots
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.queue.overtaking import Overtaking
from engine_core.scheduling.queue.preemption import Preemption, keeping_place
from engine_core.scheduling.queue.shares import Owners, TimeShares, WorkClass, class_of
from engine_core.scheduling.queue.waiting_queue import (
    PausedSequences,
    WaitingQueue,
    comes_before,
    order,
    remove,
    used_by_owner,
)
from engine_core.scheduling.request_checks import check_config, full_queue, refusal, token_limit
from engine_core.scheduling.sequence import Key, Place, Record, Sequence
from engine_core.scheduling.stats import Counters
from engine_core.scheduling.step_results import StepResults, put
from engine_core.scheduling.step_timing import StepTiming
from worker.protocol import StepBounds
from worker.worker_facts import WorkerFacts

_WORTH_SAYING = 0.1
"""A request that is expected to wait for so many seconds is told at once."""


class Scheduler:
    """Plans steps for the requests of all clients, and turns what steps bring into outputs."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts, vocab_size: int) -> None:
        check_config(config, facts)
        self.counters = Counters(kernel_compilations=facts.kernel_compilations)
        self.hooks = Hooks()
        self.pace = StepTiming(config, facts)
        by_priority = config.scheduling_policy == "priority"
        self.waiting = WaitingQueue(by_priority, self.hooks)
        self.owners = Owners()
        self.running: list[Sequence] = []
        self.live: dict[Key, Sequence] = {}
        """All sequences that wait, run or are paused."""
        self.paused = PausedSequences(self.live, self.waiting, self.hooks)
        self._config, self._facts, self._vocab_size = config, facts, vocab_size
        self.caches = config.enable_prefix_caching and facts.keeps_prefixes
        self.depth = config.depth
        """The most steps in flight."""
        by_default = config.steps_ahead is None and config.pipeline_parallel_size == 1
        self._decodes_ahead = by_default and facts.device == "cpu"
        """Whether steps are planned ahead only while some sequence decodes."""
        self._concurrent = config.depth if config.pipeline_parallel_size > 1 else 1
        """Steps that stages work on at the same time, over which sequences are spread."""
        self.cache = CacheManager(facts, self.hooks, caches=self.caches)
        self._shares = TimeShares()
        self._overtaking = Overtaking(
            *(self.waiting, self.cache, self.pace.waits, self._shares),
            go_on=self._continue,
            admit=self._admit,
        )
        self.only: list[Sequence] = []
        """The only sequences that may be in steps, if not all may; none is planned ahead then."""
        self.preemption = Preemption(self.waiting, self.owners, self.preempt, by_priority=by_priority)
        self.results = StepResults(
            *(self.hooks, self.pace, self.cache, self.paused),
            preempt=self.preempt,
            end=self.end,
        )
        self.cache_full = False
        """Whether a sequence waits for memory, as of the step planned last."""

    # Requests come and go.

    def add(self, client: int, request: AddRequest, now: float) -> Admitted | Tokens | Failed | None:
        """Take a request in, or return its last answer: why it cannot be taken in, or that it has all its
        tokens. If it will wait for long, returns for how long."""
        if refused := self.refusal(client, request):
            return refused
        key, facts, hooks = (client, request.id), self._facts, self.hooks.at_arrival(request)
        arrived = request.sent or now  # an engine reads requests between steps
        owner = self.owners.enter(request, class_of(request))
        place, limit = self.waiting.order_of(client, request, owner), token_limit(request, facts)
        seq = Sequence(key, request, place, limit, owner, Record(arrived))
        for enter in hooks.enter:
            enter(seq)
        self.live[key] = seq
        self.pace.step_bound.background += seq.work_class is WorkClass.BACKGROUND
        self.pace.waits.enter(seq, self.cache.cached_tokens(seq))
        self.waiting.add(seq)
        if seq.resumed:
            self.pace.begin_decoding(seq)
        else:
            seq.record.expected = now - arrived + self._expected_wait(seq.work_class, now, seq)
        for forecast in hooks.forecast:
            if last := forecast(seq, now):
                self.end(seq)
                return last
        if seq.record.expected is not None and request.streams and seq.record.expected >= _WORTH_SAYING:
            return Admitted(request.id, seq.record.expected)
        return None

    def refusal(self, client: int, request: AddRequest, elsewhere: int = 0) -> Failed | None:
        """Why a request cannot be taken in; so many others wait elsewhere."""
        if (client, request.id) in self.live:
            return Failed(id=request.id, code=400, message="a live request has the same id")
        facts, hooks = self._facts, self.hooks.at_arrival(request)
        for facts_of in hooks.facts_of:
            facts = facts_of(request, facts)
        reason = refusal(request, facts, self._vocab_size)
        for refuse in hooks.refuse:
            reason = reason or refuse(request)
        if reason:
            return Failed(id=request.id, code=400, message=reason)
        if request.prompt_len:  # it has begun
            return None
        queued = self.waiting.count + elsewhere - len(self.cache.free_slots)
        clause = None
        for lacks_room in hooks.lacks_room:
            clause = clause or lacks_room(request)
        if clause := clause or full_queue(queued, self._config.max_num_queued_reqs):
            return Failed(request.id, 503, f"{clause}: try again later")
        return None

    def abort(self, keys: Iterable[Key], now: float) -> OutputsByClient:
        """End requests, wherever they are. Those that have ended already are passed over."""
        outputs: OutputsByClient = {}
        for seq in [self.live[key] for key in keys if key in self.live]:
            put(outputs, seq, self.results.aborted(seq, now))
            self.end(seq)
        return outputs

    # A step is planned.

    def may_plan(self, in_flight: int) -> bool:
        """Whether a step may be planned while so many others are in flight.

        By default a CPU plans ahead only for sequences that decode, which are in every step. Prompts would
        be spread over two steps, which take longer than one with all, and newcomers would wait for both.
        """
        if not self.live:
            return False
        if self.only:
            return not in_flight
        if in_flight >= (1 if self._decodes_ahead and not self.pace.decoding else self.depth):
            return False
        if in_flight:
            for waits_for_landing in self.hooks.waits_for_landing:
                if waits_for_landing():
                    return False
        return True

    @property
    def may_admit(self) -> bool:
        """Whether the next step may have a sequence that waits."""
        waiting = self.waiting
        return bool(self.cache.free_slots and not self.cache_full and waiting.count and waiting.classes())

    def schedule(self, now: float) -> PlannedStep | None:
        """Plan the next step, or None if nothing can be computed before one in flight has landed."""
        step = StepBuilder(self._config, self._facts, self.pace.step_time, self.hooks, self.pace.may_split)
        for may_begin in self.hooks.may_begin:
            if not may_begin(now):
                return None
        if self.only:
            self._plan_only(self.only, step, now)
        else:
            self._plan(step, now)
        planned = step.finish(self.counters.steps + 1)
        if planned is not None:
            self.counters.steps += 1
            self.counters.step_tokens += self._facts.max_num_batched_tokens - step.budget
            self.pace.plan(planned, now)
        return planned

    def bind(self, planned: PlannedStep, outputs: OutputsByClient) -> StepBounds | None:
        """Tell the bounds that a step waits for; None if they depend on an earlier step.

        Sequences that cannot go on end, and `outputs` gets their answers.
        """
        found = (bind(planned, outputs) for bind in self.hooks.bind)
        return next(filter(None, found), None)

    def _plan_only(self, group: list[Sequence], step: StepBuilder, now: float) -> None:
        """Add rows for these sequences, and for nobody else, who give way if there is no memory."""
        while True:
            for seq in list(group):
                if seq.place is Place.RUNNING:
                    self._continue(seq, seq.gap, step)
                elif not step.full and (prefix := self.cache.match(seq)) is not None:
                    self._admit(seq, prefix, step, now)
            others = [seq for seq in self.running if seq not in group]
            if step.rows or not others:
                return
            self.preempt(others[-1])

    def _plan(self, step: StepBuilder, now: float) -> None:
        runnable = self.runnable()
        for choose in self.hooks.choose:
            runnable = choose(runnable)
        held_back = None
        if self.waiting.count and self.running:
            held_back = self.preemption.make_room(self.running, self.cache.fits)
        # Single tokens come first: a prompt delays nobody's next token by more than its chunk.
        decodes: list[Sequence] = []
        prefills: dict[WorkClass, list[Sequence]] = {}
        for seq in runnable:
            if seq is not held_back and (gap := seq.gap):
                first = gap == 1 and seq.work_class != WorkClass.BACKGROUND
                (decodes if first else prefills.setdefault(seq.work_class, [])).append(seq)
        if self._concurrent > 1 and len(self.owners.active) > 1:
            decodes.sort(key=keeping_place)  # a step of some of them has one that gets the memory it needs
        for seq in decodes[: -(-len(self.running) // self._concurrent)]:
            if step.budget and seq.place is Place.RUNNING:
                self._continue(seq, 1, step)
        self.pace.bound(step)
        if prefills or self.waiting.count or self._shares.active:
            self._fill(step, prefills, now)
        for complete in self.hooks.complete:
            complete(step)

    def _fill(self, step: StepBuilder, prefills: dict[WorkClass, list[Sequence]], now: float) -> None:
        """Give what is left of a step to prompts and texts, class by class in turn."""
        most = -(-len(self.live) // self._concurrent)
        waiting = self.waiting.classes() if self.waiting.count else set[WorkClass]()
        classes = waiting.union(prefills)
        self._shares.begin_step(classes)
        if len(self.owners.active) > 1:
            for running in prefills.values():
                running.sort(key=used_by_owner)
        if self.pace.may_split and WorkClass.FIRST_TOKEN in classes and len(self.pace.waits.prompts) > 1:
            reading = prefills.get(WorkClass.FIRST_TOKEN, [])
            self._overtaking.fill(reading, step, most, now, may_admit=not self.cache_full)
        most_running = -(-len(self.running) // self._concurrent)
        self.cache_full = False
        while classes and not step.full:
            promoted = self.waiting.next_promoted if waiting and len(step.rows) < most else None
            turn = self._shares.whose_turn(classes) if promoted is None else promoted.work_class
            first = self.waiting.first(turn) if turn in waiting and len(step.rows) < most else None
            running = prefills.get(turn, ())
            ahead = first is not None and (
                first is promoted or not running or comes_before(first, running[0])
            )
            if running and not ahead:
                seq = prefills[turn].pop(0)
                if len(step.rows) < most_running and seq.place is Place.RUNNING:
                    cost = self._continue(seq, seq.gap, step)
                    self._shares.charge(turn, cost)
                    if not cost and seq.computed < seq.free_from:
                        waiting = set()  # nor must they take the room in steps that its next item waits for
            elif first is None:
                classes = classes - {turn}
            elif self.waiting.is_diverted(first, now):
                continue
            elif (prefix := self.cache.match(first)) is None:
                if victim := self.paused.victim():
                    self.preempt(victim)
                    continue
                waiting = set()  # what came later must not take the memory that this one waits for
                self.cache_full = True
            elif (cost := self._admit(first, prefix, step, now)) is None:
                waiting = waiting - {turn} if promoted is None else set()
            else:
                self._shares.charge(turn, cost)

    def runnable(self) -> list[Sequence]:
        """The running sequences that can take part in another step now."""
        running = [seq for seq in self.running if not seq.paused] if self.paused else self.running
        return running if self._concurrent == 1 else [seq for seq in running if not seq.pending]

    def _continue(self, seq: Sequence, gap: int, step: StepBuilder) -> float:
        """Add a row for a running sequence with this gap, if it fits; returns the seconds that it takes."""
        count = step.chunk(seq, gap, seq.computed, alone=len(self.running) == 1)
        fits = count and (not step.pooled or step.can_pool(seq, ends=count == gap))
        if not fits or (gained := self._grow(seq, seq.computed + count)) is None:
            return 0.0
        seq.owner.used[seq.work_class] += count * seq.owner.per_token
        return step.add(seq, count, gained)

    def _admit(self, seq: Sequence, prefix: Prefix, step: StepBuilder, now: float) -> float | None:
        """Add a row for a waiting sequence, which runs from now on, if it fits; returns its seconds."""
        gap = seq.gap - prefix.length
        count = step.chunk(seq, gap, prefix.length, alone=not self.running)
        if not count or (count < gap and not step.may_split) or not step.can_pool(seq, ends=count == gap):
            return None
        self.waiting.admit(seq)
        self.pace.waits.count_answer(seq, -1)
        insort(self.running, seq, key=order)
        slot = self.cache.admit(seq, prefix)
        again = seq.record.started is not None
        if not again:
            seq.record.started, seq.record.cached = now, seq.computed
            if self.caches:
                self.counters.prefix_queries += seq.prompt_len
                self.counters.prefix_hits += seq.record.cached
        step.enter(seq, slot, again=again)
        if prefix.end:
            step.copy(prefix.end, [table[-1] for table in seq.tables])
        self.cache.grow(seq, seq.computed + count)
        seq.owner.used[seq.work_class] += count * seq.owner.per_token
        blocks = [block for table in seq.tables for block in table]
        return step.add(seq, count, blocks)

    def _grow(self, seq: Sequence, positions: int) -> list[int] | None:
        """Give a sequence blocks for so many positions; if need be, preempt sequences that come after it."""
        while (gained := self.cache.grow(seq, positions)) is None:
            victim = self.paused.victim() or self.preemption.for_memory(seq, self.running)
            if victim is None:
                return None
            self.preempt(victim)
        return gained

    def preempt(self, seq: Sequence) -> None:
        """Let a running sequence wait again; what steps in flight still bring for it is dropped."""
        self._release(seq)
        seq.computed = seq.pending = 0
        seq.void_before = self.counters.steps + 1
        seq.record.prompt_logprobs = []
        seq.record.preemptions += 1
        self.counters.preemptions += 1
        self.pace.waits.enter(seq, 0)
        if not seq.paused:
            self.waiting.add(seq)

    def _release(self, seq: Sequence) -> None:
        """Stop running a sequence: its slot and its blocks are free at once."""
        remove(self.running, seq)
        self.waiting.release(seq.owner)
        self.cache.release(seq)

    def end(self, seq: Sequence) -> None:
        """Forget a sequence, whose terminal answer is given or is being given."""
        self.pace.leave(seq)
        self.pace.step_bound.background -= seq.work_class is WorkClass.BACKGROUND
        self.owners.leave(seq.owner, seq.work_class)
        seq.done = True
        del self.live[seq.key]
        if seq.place is Place.RUNNING:
            self._release(seq)
        elif seq.place is Place.WAITING and not seq.paused:
            self.waiting.remove(seq)
        self.paused.discard(seq)
        for leave in self.hooks.leave:
            leave(seq)

    # Statistics.

    def _slots(self, newcomers: int) -> Slots:
        free = 0 if self.cache_full else len(self.cache.free_slots)
        usable = max(1, len(self.running) + free)
        return Slots(self.running, usable, self.waiting.able + newcomers - free)

    def _expected_wait(self, work_class: WorkClass, now: float, seq: Sequence | None = None) -> float:
        """The seconds until `seq`, or else a short prompt that came now, would have its first answer."""
        # Texts need no slot of another: they end with the step that completes them.
        slots = None if work_class is WorkClass.POOLING else self._slots(newcomers=seq is None)
        return self.pace.expected_wait(work_class, now, slots, seq)

    def stats(self, now: float) -> Stats:
        stats = self.counters.stats(
            running=len(self.running),
            waiting=self.waiting,
            kv_usage=self.cache.pool.usage,
            pace=self.pace,
            expected_wait=self._expected_wait(WorkClass.FIRST_TOKEN, now),
            slots=self._slots(newcomers=0),
        )
        for add_stats in self.hooks.add_stats:
            stats = add_stats(stats)
        return stats
