"""An engine without its process: requests go in, steps are run, outputs come out. It knows no socket.

`step` is the whole of it: what has become due is done, the scheduler plans a step, the executor gets it, and
when the oldest step in flight is done, its results become outputs, and the next one is planned. Requests come
between two calls of `step`. Most of what stands around it answers one question: is there something to do now,
or until when can whoever drives the engine sleep?

What an engine does for some models or requests only is done by features of its scheduler, which it calls by
their hooks. It waits for nothing by itself: steps (`steps_in_flight.py`), requests that are not ready yet
(`intake/`) and calls of workers (`executor.py`) are kept by others, which it asks.

The offline LLM class drives it directly; engine_core/engine_main.py drives it from the wire.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from math import inf

import zmq
from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.engine_stats import Stats
from engine_core.executor import CallQueue, Executor, MakeExecutor, Preparation
from engine_core.intake.intake import Intake
from engine_core.load_engine import ModelLoader, ReportProgress, make_steps_in_flight
from engine_core.protocol import AddRequest, Failed, OutputsByClient, PauseMode, Ready
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Key
from worker.calls.messages import COMPARE_WEIGHTS
from worker.host.machine import is_short_of_memory
from worker.host.progress_page import ProgressWriter, StepProgress

_log = logging.getLogger(__name__)


class Engine:
    """Runs the requests of numbered clients; `step` returns outputs by client number."""

    def __init__(
        self,
        ready: Ready,
        scheduler: Scheduler,
        executor: Executor,
        progress_page: str = "",
        load: ModelLoader | None = None,
        *,
        is_uninterrupted: bool = False,
    ) -> None:
        """`progress_page`: the file in which a supervisor reads how steps go on; `load` loads all again.

        `is_uninterrupted`: whether no signal raises an exception in the thread that calls `step`.
        """
        self._is_uninterrupted = is_uninterrupted
        self.ready = ready
        self.refusal: tuple[str, str] | None = None
        """Why no request is taken, if none is: a clause for people, and a code, which may be empty."""
        self.asleep = False
        """Whether weights and cache are given back, so that no step can run."""
        self.paused = False
        """Whether no step is planned, because an operator has paused all requests."""
        self._load = load
        self.progress = StepProgress(ProgressWriter(progress_page), plans=True)
        self._use(scheduler, executor)
        self._unbound: deque[PlannedStep] = deque()
        self.calls = CallQueue(lambda call: self._executor.call(call))
        self.intake = Intake(ready, scheduler, self.calls)
        self.outputs: OutputsByClient = {}
        """What clients get, until somebody takes it."""
        self._blocked = False
        """Whether no other step could be planned when that was last tried."""
        self._failed = False
        """Whether a step has failed, and none was planned since all that were in flight have landed."""

    def _use(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._preparation = Preparation(executor, is_left=self.ready.worker.has_idle_work)
        self._in_flight = make_steps_in_flight(
            executor, self.progress, scheduler.depth, may_run_here=self._is_uninterrupted
        )

    @classmethod
    def start(cls, config: EngineConfig, report: ReportProgress, make: MakeExecutor | None = None) -> Engine:
        """Find the model, load it, allocate its cache. Returns when a request can run.

        `make` makes another executor than the one that the configuration asks for.
        """
        load = ModelLoader(config, report, make)
        return cls(*load(), load=load)

    def stop(self) -> None:
        self.intake.stop()
        self._stop_executor()

    def _stop_executor(self) -> None:
        """Let features bring to an end what outlives the engine, and give weights and cache back."""
        if not self.asleep:
            for stop in self._scheduler.hooks.stop:
                stop()
        self._executor.stop()

    def fall_asleep(self) -> None:
        """Give weights and cache back to the system. Call this when nothing runs."""
        self._stop_executor()
        self.asleep = True

    def wake(self) -> None:
        """Load the model again. If that raises an error, the engine sleeps on."""
        if self._load is not None:
            self._reload(self._load)
        self.asleep, self.refusal = False, None

    def _reload(self, load: ModelLoader) -> None:
        """Load weights again, or others of the same model, which is what servers know it as."""
        ready, scheduler, executor = load(self.ready.worker.timed_steps)
        self.ready = replace(self.ready, worker=ready.worker, start_seconds=ready.start_seconds)
        self._load = load
        self._use(scheduler, executor)
        self.intake.use(scheduler)

    def find_weights(self, folder: str) -> ModelLoader:
        """Compare the weights of a folder with the model, before anything is changed -> what loads them.

        Raises an error that says why they do not fit.
        """
        if self._load is None or self.asleep or self.intake.answers_queries:
            raise ValueError(
                "weights cannot be replaced while the model sleeps, or if it reads documents only"
            )
        load = self._load.at(folder, self.ready.worker)
        while self._in_flight.steps:  # one may wait for bounds, and hold the call up
            self._collect(self._finish())
            self._bind()
        self.progress.rest()  # what follows may take minutes, and is no step that hangs
        for problem in self.calls.wait_for(COMPARE_WEIGHTS, [load.folder], {}):
            if problem:
                raise ValueError(problem)
        return load

    def update_weights(self, folder: str) -> None:
        """Compute with the weights of a folder from now on. The requests that are here go on from the tokens
        that they have. Raises an error if the weights are those from before."""
        load, before = self.find_weights(folder), self._load
        live = self.intake.take_back()
        self._stop_executor()
        try:
            self._reload(load)
            self.ready = replace(self.ready, weights=folder)
        except Exception:
            _log.error("the weights of %s cannot be loaded: those from before are loaded again", folder)
            self._reload(before or load)
            raise
        finally:
            self._failed = self._blocked = False
            self.intake.add_again(live)

    def register(self, poller: zmq.Poller) -> None:
        """Let the next poll wake when a step is done; `waits` says afterwards whether to poll for it."""
        if not self.asleep:
            self._executor.register(poller)
        if self.intake.has_queues:
            self.intake.register(poller)

    @property
    def waits(self) -> bool:
        """Whether nothing can be done before a step in flight is done, or a request comes."""
        if not self._blocked or self._has_news:
            return False
        if self._in_flight.is_busy:
            return self._in_flight.waits
        return any(waits() for waits in self._scheduler.hooks.waits)

    @property
    def next_deadline(self) -> float:
        """The time by which `step` must be called, though no step is done and no request has come."""
        pace, first = self._scheduler.pace, self.intake.next_look if self.intake.has_queues else inf
        for next_time in self._scheduler.hooks.next_time:
            first = min(first, next_time())
        if pace.step_bound.background and pace.plan_at > time.monotonic() and self._in_flight.has_room:
            first = min(first, pace.plan_at)
        return first

    def prepare(self, *, wait: bool = False) -> bool:
        """Have the worker prepare something while nothing runs -> whether it does, or has with `wait`."""
        if self.asleep:
            return False
        for work_idle in self._scheduler.hooks.work_idle:
            work_idle(time.monotonic())
        return self._executor.idle(wait=wait)

    def check(self) -> None:
        """Raises ExecutorDead if no step can run any more."""
        if not self.asleep:
            self._executor.check()

    @property
    def busy(self) -> bool:
        """Whether step() has something to do or to return."""
        pending = self._in_flight.is_busy or self.outputs or self.intake.is_busy or self.calls.under_way
        return bool(self._scheduler.live or pending)

    @property
    def idle(self) -> bool:
        """Whether nothing can be done before a request comes, is compiled, or goes on that is paused."""
        scheduler = self._scheduler
        goes_on = len(scheduler.live) != len(scheduler.paused) and not self.paused
        if goes_on or self._in_flight.is_busy or self.outputs:
            return False
        return not self._has_news

    @property
    def _has_news(self) -> bool:
        """Whether requests that were not ready, or calls of workers, have come to their end."""
        intake, calls = self.intake, self.calls
        news = bool(intake.outputs) or (intake.has_queues and intake.has_news)
        return news or (bool(calls.under_way) and calls.has_returned)

    def leave(self, until: float) -> bool:
        """Whether an engine that drains may end: nothing is left to do here, nor, `until` then, elsewhere."""
        return self._in_flight.leave(until, busy=self.busy)

    @property
    def first_leaves(self) -> bool:
        """Whether another engine ends, with which this one has to end."""
        return self._in_flight.first_leaves

    def stats(self) -> Stats:
        stats = self._scheduler.stats(time.monotonic())
        if not (deferred := len(self.intake)):
            return stats
        return replace(stats, waiting=stats.waiting + deferred, deferred=deferred)

    def add(self, client: int, request: AddRequest) -> None:
        """Take a request in. Whatever happens, later steps return exactly one terminal answer to it."""
        if self.refusal is not None:
            self.intake.answer(client, Failed(request.id, 503, *self.refusal))
        else:
            self.intake.add(client, request)
        self._collect(self.intake.take_outputs())

    def abort(self, client: int, ids: Iterable[int]) -> None:
        """End requests, wherever they are. Those that have ended are passed over."""
        self._abort([(client, id) for id in ids])

    def abort_all(self, client: int | None = None) -> None:
        """End all requests of one client, or of all clients."""
        keys = [*self._scheduler.live, *self.intake.keys()]
        self._abort([key for key in keys if client is None or key[0] == client])

    def _abort(self, keys: list[Key]) -> None:
        self.intake.abort(keys)
        self._collect(self.intake.take_outputs())
        self._collect(self._scheduler.abort(keys, time.monotonic()))

    def pause(self, client: int, ids: Iterable[int], *, paused: bool = True) -> None:
        """Compute nothing more for these requests until they are `paused` no more."""
        keys = [(client, id) for id in ids]
        self.intake.set_paused(keys, paused=paused)
        (self._scheduler.paused.pause if paused else self._scheduler.paused.resume)(keys)

    def pause_all(self, mode: PauseMode) -> None:
        """Begin to pause: plan no more steps, or with "wait" none for requests that come from now on."""
        if mode == "abort":
            self.abort_all()
        if mode != "wait":
            self.paused = True
        elif not self.paused:
            self.intake.hold()

    @property
    def stands_still(self) -> bool:
        """Whether a pause that has begun has come about, so that nothing is computed."""
        return not (self._in_flight.is_busy if self.paused else self.busy)

    def complete_pause(self) -> None:
        """Take in the requests that were held, none of which is computed before `resume_all`."""
        self.paused = True
        self.intake.release()

    def resume_all(self) -> None:
        self.paused = False
        self.intake.release()

    def ask(self, client: int, id: int) -> None:
        """Say how far a request has come. Nothing is said of one that has ended."""
        if (seq := self._scheduler.live.get((client, id))) is not None:
            self._collect({client: [self._scheduler.waiting.standing(seq)]})

    def drain(self) -> None:
        """Refuse requests from now on; those that are here run on."""
        self.resume_all()
        self.refusal = "the engine is shutting down", ""

    def reset_prefix_cache(self) -> None:
        self._scheduler.cache.reset_prefixes(self._scheduler.running)
        for forget_prefixes in self._scheduler.hooks.forget_prefixes:
            forget_prefixes()

    def step(self, *, wait: bool = True) -> OutputsByClient:
        """Plan a step if another one may be in flight, else finish the oldest; returns all new outputs.

        Without `wait`, a step that is not done yet is left for a later call, and behind one that is done the
        next one is planned at once.
        """
        in_flight, hooks, intake = self._in_flight, self._scheduler.hooks, self.intake
        if not self.asleep:
            in_flight.receive()
        if intake.has_queues and intake.heed():
            intake.advance(wait=wait and self.idle)
        if intake.outputs:
            self._collect(intake.take_outputs())
        for poll in hooks.poll:
            if due := poll(time.monotonic(), len(in_flight.steps)):
                self._collect(due)
        if self._preparation.due_in <= 0 and not in_flight.steps:
            self._preparation.run()
        # Where no step could be planned behind one that is done now, it lands before that is tried again.
        lands = self._blocked and not wait and bool(in_flight.steps) and not in_flight.waits
        may_go_on = not lands and self._plan(wait=wait)
        for work_beside in hooks.work_beside:
            work_beside(time.monotonic(), len(in_flight.steps), wait)
        if lands or (in_flight.steps and not may_go_on and (wait or not in_flight.waits)):
            self._collect(self._finish())
            if self._unbound:
                self._bind()  # first of all: the forward of the next step may be over
            may_go_on = wait or self._plan(wait=wait)  # it runs while others read what came of the last one
        self._blocked = not may_go_on
        return self.take_outputs()

    def _may_plan(self, *, wait: bool) -> bool:
        """Whether a step may be planned now; whoever will `wait` for one in flight cannot plan later."""
        if self.paused or self._preparation.due_in <= 0 or not self._in_flight.has_room:
            return False
        pace = self._scheduler.pace
        if not wait and pace.step_bound.background and time.monotonic() < pace.plan_at:
            return False
        return self._scheduler.may_plan(len(self._in_flight.steps))

    def _plan(self, *, wait: bool) -> bool:
        """Plan a step and have it run, if one can be planned -> whether another one may be planned."""
        planned = None
        if not (self._failed and self._in_flight.steps) and self._may_plan(wait=wait):
            planned = self._scheduler.schedule(time.monotonic())
        if planned is None:
            self._in_flight.follow()
            return False
        step = replace(planned.step, fresh=True) if self._failed else planned.step
        self._failed = False
        self._preparation.due_in -= 1
        self._in_flight.submit(planned, step, planned.expected * self._scheduler.pace.step_time.margin)
        if planned.binds:
            self._unbound.append(planned)
            self._bind()
        return self._may_plan(wait=wait)

    def take_outputs(self) -> OutputsByClient:
        outputs, self.outputs = self.outputs, {}
        return outputs

    def _finish(self) -> OutputsByClient:
        """Wait for the oldest step and turn what it brings into outputs."""
        planned, outcome, seconds = self._in_flight.take()
        counters, results = self._scheduler.counters, self._scheduler.results
        counters.landed.count(planned, seconds)
        if not isinstance(outcome, Exception):
            counters.kernel_compilations = outcome.kernel_compilations
            return results.land(planned, outcome, time.monotonic())
        number, count = planned.step.number, len(planned.seqs)
        _log.error("step %d failed; its %d requests are computed again", number, count, exc_info=outcome)
        behind, self._failed = self._failed, True
        short = is_short_of_memory(outcome)
        return results.land_failed(planned, time.monotonic(), short_of_memory=short, behind=behind)

    def _bind(self) -> None:
        """Tell the bounds of each step, in order, that waits for no sample of an earlier one."""
        while self._unbound:
            failed: OutputsByClient = {}
            bounds = self._scheduler.bind(self._unbound[0], failed)
            if bounds is None:
                return
            self._unbound.popleft()
            self._executor.bind(bounds)
            self._collect(failed)

    def _collect(self, outputs: OutputsByClient) -> None:
        """Keep outputs until the next call of `step`, or its end."""
        if not self.outputs:
            self.outputs = outputs
            return
        for client, new in outputs.items():
            self.outputs.setdefault(client, []).extend(new)
