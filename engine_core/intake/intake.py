"""Keeps requests until they can be scheduled: grammars are compiled first, and adapters loaded."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path

import zmq

from engine_core.executor import CallQueue
from engine_core.features.adapters.adapter_table import AdapterTable
from engine_core.features.adapters.adapter_turns import AdapterTurns
from engine_core.features.grammar.answer_bounds import AnswerBounds
from engine_core.grammar.compile_queue import CompileQueue, Key
from engine_core.grammar.matcher import TokenMatcher
from engine_core.intake.static_queries import StaticQueries
from engine_core.protocol import AddRequest, Failed, Grammar, OutputsByClient, Pooled, Ready, Spelling, Tokens
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Sequence, as_request


class Intake:
    """Takes requests in; whatever becomes of one, exactly one terminal answer follows."""

    def __init__(self, ready: Ready, scheduler: Scheduler, calls: CallQueue) -> None:
        """`calls`: those of workers, which load adapters."""
        self._ready = ready
        self._compile_queue: CompileQueue | None = None
        """Requests whose grammar is being compiled, once tokens are known by their bytes."""
        self._queries = StaticQueries.open(Path(ready.folder))
        """What answers queries without a step, if the model reads only documents."""
        turns = scheduler.hooks.find(AdapterTurns)
        self.adapters = None if turns is None else AdapterTable(turns.held, calls.begin)
        """The adapters that requests may name, if they may name any."""
        self.outputs: OutputsByClient = {}
        """What clients get of requests that came no further."""
        self._held: list[tuple[int, AddRequest]] | None = None
        """The requests that have come while others are finished before a pause, if there shall be one."""
        self.has_queues = self.adapters is not None
        """Whether requests may have to wait here: for an adapter, or for a grammar."""
        self.use(scheduler)

    def use(self, scheduler: Scheduler) -> None:
        """Give requests to this scheduler from now on."""
        self._scheduler = scheduler
        self._turns = scheduler.hooks.find(AdapterTurns)
        if self._turns is not None and self.adapters is not None:
            self._turns.table = self.adapters
            self.adapters.wake()

    @property
    def may_reload(self) -> bool:
        """Whether workers may be replaced now: not while one loads an adapter."""
        return self.adapters is None or self.adapters.loading is None

    @property
    def answers_queries(self) -> bool:
        """Whether queries are answered here, by the checkpoint of the start."""
        return self._queries is not None

    def stop(self) -> None:
        if self._compile_queue is not None:
            self._compile_queue.stop()

    def register(self, poller: zmq.Poller) -> None:
        if self._compile_queue is not None:
            self._compile_queue.register(poller)

    def heed(self) -> bool:
        """Note what threads for grammars have told -> whether `advance` may have something to do."""
        if self._compile_queue is not None:
            self._compile_queue.heed()
        return self.is_busy

    def __len__(self) -> int:
        """The number of requests here."""
        waiting = len(self._held or ()) + (0 if self.adapters is None else len(self.adapters.keys()))
        return waiting + (len(self._compile_queue) if self._compile_queue else 0)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do for requests or adapters, or to be told."""
        adapters = self.adapters is not None and self.adapters.is_busy
        return bool(self._compile_queue or self.outputs or adapters)

    @property
    def has_news(self) -> bool:
        """Whether `advance` has something to do, compiled grammars aside."""
        return self.adapters is not None and self.adapters.has_news

    @property
    def next_look(self) -> float:
        """The time by which `advance` must be called, though nothing has happened."""
        adapters = None if self.adapters is None else self.adapters.next_look
        compiled = self._compile_queue.next_deadline if self._compile_queue else None
        return min(inf if adapters is None else adapters, inf if compiled is None else compiled)

    def take_outputs(self) -> OutputsByClient:
        outputs, self.outputs = self.outputs, {}
        return outputs

    def spell(self, spelling: Spelling) -> None:
        """Learn how tokens are spelled, so that requests may have grammars."""
        if self._compile_queue is None:
            self._compile_queue = CompileQueue(self._ready.vocab_size, self._ready.folder)
            self.has_queues = True
        self._compile_queue.spell(spelling)

    def hold(self) -> None:
        """Keep requests that come from now on until `release`."""
        self._held = self._held or []

    def release(self) -> None:
        """Let the requests that were held go on their way."""
        held, self._held = self._held or (), None
        for client, request in held:
            self.add(client, request)

    def add(self, client: int, request: AddRequest, matcher: TokenMatcher | None = None) -> None:
        if self._held is not None and not request.prompt_len:
            self._held.append((client, request))
        elif self._queries is not None and (answer := self._queries.answer(request)) is not None:
            refused = self._scheduler.refusal(client, request, elsewhere=len(self))
            self.answer(client, refused or answer)
        elif request.grammar is None or matcher is not None:
            self._add_compiled(client, request, matcher)
        elif refused := self._compile(client, request, request.grammar):
            self.answer(client, refused)

    def take_back(self) -> list[Sequence]:
        """Take all sequences from the scheduler; what they use stays known until they are added again."""
        live = list(self._scheduler.live.values())
        for seq in live:
            if self.adapters is not None and seq.request.adapter:
                self.adapters.begin(seq.request.adapter)
            self._scheduler.end(seq)
        return live

    def add_again(self, live: list[Sequence]) -> None:
        """Have sequences that were taken back go on from the tokens that they have."""
        for seq in live:
            self.add(seq.key[0], as_request(seq))
            if seq.paused:
                self.set_paused([seq.key], paused=True)
                self._scheduler.paused.pause([seq.key])
            if self.adapters is not None and seq.request.adapter:
                self.adapters.end(seq.request.adapter)

    def answer(self, client: int, answer: Failed | Tokens | Pooled) -> None:
        self.outputs.setdefault(client, []).append(answer)

    def _compile(self, client: int, request: AddRequest, grammar: Grammar) -> Failed | None:
        """Have the grammar of a request compiled, after which it goes on its way."""
        if self._compile_queue is None:
            return Failed(id=request.id, code=500, message="the server has not said how tokens are spelled")
        if refused := self._scheduler.refusal(client, request, elsewhere=len(self)):
            return refused
        if (client, request.id) in self._compile_queue:
            return Failed(id=request.id, code=400, message="a live request has the same id")
        if refused := self._compile_queue.refusal(request):
            return refused
        self._compile_queue.add(client, request, grammar)
        self._take_compiled()  # it may be known
        return None

    def advance(self, *, wait: bool = False) -> None:
        """Give requests to the scheduler that can run now. With `wait`, wait until there is one."""
        if self._compile_queue:
            if wait:
                self._compile_queue.wait()
            self._take_compiled()
        if (adapters := self.adapters) is None:
            return
        if wait and not self._compile_queue:
            adapters.wait()
        adapters.advance()
        for client, failed in adapters.take_failed():
            self.answer(client, failed)
        for ready in adapters.leave():
            self._schedule(ready.client, ready.request, ready.matcher, paused=ready.paused)

    def _take_compiled(self) -> None:
        for compiled in self._compile_queue.leave() if self._compile_queue else ():
            outcome = compiled.outcome()
            if isinstance(outcome, Failed):
                self.answer(compiled.client, outcome)
            else:
                self._add_compiled(compiled.client, compiled.request, outcome, paused=compiled.paused)

    def _add_compiled(
        self, client: int, request: AddRequest, matcher: TokenMatcher | None, *, paused: bool = False
    ) -> None:
        if not request.adapter:
            return self._schedule(client, request, matcher, paused=paused)
        if self.adapters is None or self._turns is None:
            return self.answer(client, Failed(request.id, 400, "the engine has no adapters"))
        request = self.adapters.renewed(request)
        refused = self.adapters.refusal(request)
        refused = refused or self._scheduler.refusal(client, request, elsewhere=len(self))
        rank = self._turns.rank_of(request)
        entered = refused or self.adapters.enter(client, request, matcher, rank)
        if isinstance(entered, Failed):
            self.answer(client, entered)
        elif entered:
            self._schedule(client, request, matcher, paused=paused)
        elif paused:
            self.adapters.set_paused([(client, request.id)], paused=True)

    def _schedule(
        self, client: int, request: AddRequest, matcher: TokenMatcher | None, *, paused: bool
    ) -> None:
        now = time.monotonic()
        if matcher is None:
            answer = self._scheduler.add(client, request, now)
        else:
            answer = self._scheduler.hooks.get(AnswerBounds).add(client, request, now, matcher)
        if answer is not None:
            self.outputs.setdefault(client, []).append(answer)
        if paused:
            self._scheduler.paused.pause([(client, request.id)])

    def keys(self) -> list[Key]:
        """The requests that are here."""
        compiling = self._compile_queue.keys() if self._compile_queue else []
        held = [(client, request.id) for client, request in self._held or ()]
        return [*held, *compiling, *(self.adapters.keys() if self.adapters else ())]

    def abort(self, keys: list[Key]) -> None:
        """End those of these requests that are here."""
        found = self._compile_queue.discard(keys) if self._compile_queue else []
        found += self.adapters.discard(keys) if self.adapters else []
        if self._held is not None:
            ended = [one for one in self._held if (one[0], one[1].id) in keys]
            self._held = [one for one in self._held if one not in ended]
            found += [(client, request.id) for client, request in ended]
        for client, id in found:
            self.answer(client, Tokens(id=id, tokens=[], finish="abort"))

    def set_paused(self, keys: list[Key], *, paused: bool) -> None:
        for queue in (self._compile_queue, self.adapters):
            if queue:
                queue.set_paused(keys, paused=paused)
