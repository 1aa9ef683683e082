"""An engine without its process: requests go in, steps are run, outputs come out. It knows no socket.

The offline LLM class drives it directly; engine_core/process.py drives it from the wire.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import zmq
from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.engine_stats import Stats
from engine_core.executor import CallQueue, Executor, ExecutorDead, MakeExecutor, Preparation, StepFuture
from engine_core.features.adapters.adapter_table import AdapterTable
from engine_core.features.adapters.adapter_turns import AdapterTurns
from engine_core.grammar.compile_queue import Key
from engine_core.grammar.matcher import TokenMatcher
from engine_core.intake.intake import Intake
from engine_core.loading import Loaded, ReportProgress, make_loader
from engine_core.protocol import Add, Failed, OutputsByClient, Ready, Spelling
from engine_core.ranks.joint_steps import JointExecutor
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.step_builder import PlannedStep
from worker.host.machine import is_short_of_memory
from worker.host.progress_page import ProgressWriter, StepProgress
from worker.protocol import StepOutput
from worker.worker_facts import TimedSteps

_log = logging.getLogger(__name__)


class Engine:
    """Runs the requests of numbered clients; `step` returns outputs by client number."""

    def __init__(
        self,
        ready: Ready,
        scheduler: Scheduler,
        executor: Executor,
        progress_page: str = "",
        load: Callable[[TimedSteps], Loaded] | None = None,
    ) -> None:
        """`progress_page`: the file in which a supervisor reads how steps go on; `load` loads all again."""
        self.ready = ready
        self.refusal: tuple[str, str] | None = None
        """Why no request is taken, if none is: a clause for people, and a code, which may be empty."""
        self.asleep = False
        """Whether weights and cache are given back, so that no step can run."""
        self._load = load
        self.progress = StepProgress(ProgressWriter(progress_page), plans=True)
        self._scheduler, self._executor = scheduler, executor
        self._preparation = Preparation(executor, is_left=ready.worker.has_idle_work)
        self._joint = executor if isinstance(executor, JointExecutor) else None
        """The executor, if other engines take part in every step."""
        self._in_flight: deque[tuple[PlannedStep | None, StepFuture]] = deque()
        """The oldest step comes first. None: another engine planned it, and it has no rows of this one."""
        self._unbound: deque[PlannedStep] = deque()
        self.calls = CallQueue(lambda call: self._executor.call(call))
        turns = scheduler.hooks.find(AdapterTurns)
        self.adapters = None if turns is None else AdapterTable(turns.held, self.calls.begin)
        """The adapters that requests may name, if they may name any."""
        self._intake = Intake(ready, scheduler, self.adapters)
        self._outputs: OutputsByClient = {}
        self._blocked = False
        """Whether no other step could be planned when that was last tried."""
        self._failed = False
        """Whether a step has failed, and none was planned since all that were in flight have landed."""

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        report: ReportProgress,
        make: MakeExecutor | None = None,
        progress_page: str = "",
        expert_replicas: int = 1,
    ) -> Engine:
        """Find the model, load it, allocate its cache. Returns when a request can run.

        `make` makes another executor than the one that the configuration asks for.
        """
        load = make_loader(config, report, make, expert_replicas)
        ready, scheduler, executor = load()
        return cls(ready, scheduler, executor, progress_page, load)

    def stop(self) -> None:
        self._intake.stop()
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
            self.ready, self._scheduler, self._executor = self._load(self.ready.worker.timed_steps)
            is_left = self.ready.worker.has_idle_work
            self._preparation = Preparation(self._executor, is_left=is_left)
            self._intake.use(self._scheduler)
        self.asleep, self.refusal = False, None

    def register(self, poller: zmq.Poller) -> None:
        """Let the next poll wake when a step is done; `waits` says afterwards whether to poll for it."""
        if not self.asleep:
            self._executor.register(poller)
        self._intake.register(poller)

    @property
    def waits(self) -> bool:
        """Whether nothing can be done before a step in flight is done, or a request comes."""
        if not self._blocked or self.calls.has_returned or self._intake.has_news:
            return False
        if self._in_flight:
            return not self._in_flight[0][1].done()
        return any(waits() for waits in self._scheduler.hooks.waits)

    @property
    def next_deadline(self) -> float | None:
        """The time by which `step` must be called, though no step is done and no request has come."""
        plan = self._scheduler.pace.plan_at
        late = plan > time.monotonic() and len(self._in_flight) < self._scheduler.depth
        times = [plan if late else None, self._intake.next_look]
        for next_time in self._scheduler.hooks.next_time:
            times.append(next_time())
        return min([at for at in times if at is not None], default=None)

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
        pending = self._in_flight or self._outputs or self._intake.is_busy or self.calls
        return bool(self._scheduler.live or pending)

    @property
    def idle(self) -> bool:
        """Whether nothing can be done before a request comes, is compiled, or goes on that is paused."""
        scheduler = self._scheduler
        if self._in_flight or self._outputs or self._may_follow or self.calls.has_returned:
            return False
        if self._intake.has_news:
            return False
        return len(scheduler.live) == len(scheduler.paused)

    def leave(self) -> bool:
        """Whether an engine that drains may end: nothing is left to do here, nor with other engines."""
        if self.busy or self._may_follow:
            return False
        return self._joint is None or self._joint.leave()

    @property
    def shares_experts(self) -> bool:
        """Whether it takes its steps with other engines."""
        return self._joint is not None

    @property
    def first_leaves(self) -> bool:
        """Whether the first of the engines that share experts wants to end, if that is another one."""
        return self._joint is not None and self._joint.first_leaves

    def stats(self) -> Stats:
        stats = self._scheduler.stats(time.monotonic())
        if not (deferred := len(self._intake)):
            return stats
        return replace(stats, waiting=stats.waiting + deferred, deferred=deferred)

    def spell(self, spelling: Spelling) -> None:
        """Learn how tokens are spelled, so that requests may have grammars."""
        self._intake.spell(spelling)

    def add(self, client: int, request: Add, matcher: TokenMatcher | None = None) -> None:
        """Take a request in. Whatever happens, later steps return exactly one terminal answer to it."""
        if self.refusal is not None:
            self._intake.answer(client, Failed(request.id, 503, *self.refusal))
        else:
            self._intake.add(client, request, matcher)
        self._collect(self._intake.take_outputs())

    def abort(self, client: int, ids: Iterable[int]) -> None:
        """End requests in whatever state they are. Those that have ended are passed over."""
        self._abort([(client, id) for id in ids])

    def abort_all(self, client: int | None = None) -> None:
        """End all requests of one client, or of all clients."""
        keys = [*self._scheduler.live, *self._intake.keys()]
        self._abort([key for key in keys if client is None or key[0] == client])

    def _abort(self, keys: list[Key]) -> None:
        self._intake.abort(keys)
        self._collect(self._intake.take_outputs())
        self._collect(self._scheduler.abort(keys, time.monotonic()))

    def pause(self, client: int, ids: Iterable[int], *, paused: bool = True) -> None:
        """Compute nothing more for these requests until they are `paused` no more."""
        keys = [(client, id) for id in ids]
        self._intake.set_paused(keys, paused=paused)
        (self._scheduler.paused.pause if paused else self._scheduler.paused.resume)(keys)

    def ask(self, client: int, id: int) -> None:
        """Say how far a request has come. Nothing is said of one that has ended."""
        if (seq := self._scheduler.live.get((client, id))) is not None:
            self._collect({client: [self._scheduler.waiting.standing(seq)]})

    def drain(self) -> None:
        """Refuse requests from now on; those that are here run on."""
        self.refusal = "the engine is shutting down", ""

    def reset_prefix_cache(self) -> None:
        self._scheduler.cache.reset_prefixes()
        for forget_prefixes in self._scheduler.hooks.forget_prefixes:
            forget_prefixes()

    def step(self, *, wait: bool = True) -> OutputsByClient:
        """Plan a step if another one may be in flight, else finish the oldest; returns all new outputs.

        Without `wait`, a step that is not done yet is left for a later call.
        """
        planned = None
        if self._joint is not None:
            self._joint.receive()
        self._intake.heed()
        if self._intake.is_busy:
            self._intake.advance(wait=wait and self.idle)
            self._collect(self._intake.take_outputs())
        self._executor.check()  # ranks may have told something of theirs
        if due := self._scheduler.poll(time.monotonic(), self._own_in_flight):
            self._collect(due)
        if self._preparation.is_due and not self._in_flight:
            self._preparation.run()
        if not (self._failed and self._in_flight) and self._may_plan(wait=wait):
            planned = self._scheduler.schedule(time.monotonic())
        if planned is not None:
            self._submit(planned)
        elif self._joint is not None:
            self._follow(self._joint)
        for work_beside in self._scheduler.hooks.work_beside:
            work_beside(time.monotonic(), len(self._in_flight), wait)
        self._blocked = planned is None or not self._may_plan(wait=wait)
        if self._in_flight and self._blocked and (wait or self._in_flight[0][1].done()):
            self._collect(self._finish(*self._in_flight.popleft()))
            self._bind()  # first of all: the forward of the next step may be over
            self._blocked = False
        return self.take_outputs()

    @property
    def _own_in_flight(self) -> int:
        if self._joint is None:
            return len(self._in_flight)
        return sum(planned is not None for planned, _ in self._in_flight)

    def _may_plan(self, *, wait: bool) -> bool:
        """Whether a step may be planned now; whoever will `wait` for one in flight cannot plan later."""
        if self._preparation.is_due or not (wait or time.monotonic() >= self._scheduler.pace.plan_at):
            return False
        return len(self._in_flight) < self._scheduler.depth and self._scheduler.may_plan(self._own_in_flight)

    @property
    def _may_follow(self) -> bool:
        """Whether to take part in a step that another engine has planned, if none can be planned here.

        Not while a step of this engine is in flight: when that has landed, its rows can be in the next one.
        """
        if self._joint is None or not self._joint.is_behind:
            return False
        return len(self._in_flight) < self._scheduler.depth and not self._own_in_flight

    def _follow(self, joint: JointExecutor) -> None:
        while self._may_follow:
            self.progress.begin(self._scheduler.counters.steps, 0, joint.slowest)
            self._in_flight.append((None, joint.follow()))

    def _submit(self, planned: PlannedStep) -> None:
        step = replace(planned.step, fresh=True) if self._failed else planned.step
        self._failed = False
        self._preparation.steps += 1
        usual = planned.expected * self._scheduler.pace.step_time.margin
        others = 0.0 if self._joint is None else self._joint.slowest
        self.progress.begin(step.number, planned.tokens, max(usual, others))
        if self._joint is None:
            self._in_flight.append((planned, self._executor.submit(step)))
        else:
            self._in_flight.append((planned, self._joint.submit(step, usual)))
        if planned.binds:
            self._unbound.append(planned)
            self._bind()

    def take_outputs(self) -> OutputsByClient:
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _finish(self, planned: PlannedStep | None, future: StepFuture) -> OutputsByClient:
        """Wait for a step and turn what it brings into outputs."""
        if planned is None:
            try:
                future.result()
            finally:
                self.progress.end()
            return {}
        try:
            output = self._wait_for(planned, future)
        except ExecutorDead:
            raise
        except Exception as error:
            number, count = planned.step.number, len(planned.seqs)
            _log.exception("step %d failed; its %d requests are computed again, apart", number, count)
            behind, self._failed = self._failed, True
            short = is_short_of_memory(error)
            return self._scheduler.results.land_failed(
                planned, time.monotonic(), short_of_memory=short, behind=behind
            )
        return self._scheduler.results.land(planned, output, time.monotonic())

    def _wait_for(self, planned: PlannedStep, future: StepFuture) -> StepOutput:
        """The output of the oldest step in flight, whose time is learned."""
        try:
            output = future.result()
            self._scheduler.counters.heed(output)
            return output
        finally:
            seconds = time.monotonic() - self.progress.since
            self._scheduler.counters.landed.count(planned, seconds)
            self.progress.end()

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
        for client, new in outputs.items():
            self._outputs.setdefault(client, []).extend(new)
