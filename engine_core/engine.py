"""An engine without its process: requests go in, steps are run, outputs come out. It knows no socket.

The offline LLM class drives it directly; engine_core/process.py drives it from the wire.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import Executor, ExecutorDead, MakeExecutor, StepFuture
from engine_core.protocol import Add, Failed, Progress, Ready, Stats
from engine_core.ranks.placement import make_executor
from engine_core.ready import describe, make_ready
from engine_core.scheduling.scheduler import OutputsByClient, Scheduler
from engine_core.scheduling.step_builder import PlannedStep
from engine_core.worker_config import make_worker_config
from models.checkpoint.hub import resolve
from models.config import read_config
from models.parallel.shares import check_cut

ReportProgress = Callable[[Progress], None]
"""A function that is called from any thread to say how far the start has come."""

_BROKEN = "the engine failed while it computed this request"  # the log says what failed

_log = logging.getLogger(__name__)


class Engine:
    """Runs the requests of numbered clients; `step` returns outputs by client number."""

    def __init__(self, ready: Ready, scheduler: Scheduler, executor: Executor) -> None:
        self.ready = ready
        self._scheduler = scheduler
        self._executor = executor
        self._in_flight: deque[tuple[PlannedStep, StepFuture]] = deque()
        self._outputs: OutputsByClient = {}
        self._draining = False

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        report: ReportProgress,
        make: MakeExecutor | None = None,
    ) -> Engine:
        """Find the model, load it, allocate its cache. Returns when a request can run.

        `make` makes the executor; by default the one that the configuration asks for.
        """
        make = make or make_executor(ProcessConfig(engine=config, servers=[], log_level="warning"))
        found = resolve(
            config.model,
            config.revision,
            config.download_dir,
            lambda fraction: report(Progress(phase="download", fraction=fraction)),
            config.worker.load_format,
        )
        model = read_config(found, config.hf_overrides)
        check_cut(model, config.tensor_parallel_size, config.pipeline_parallel_size)
        worker_config = make_worker_config(config, model, found)
        folder = worker_config.folder
        report(Progress(phase="import", fraction=0.0, folder=folder))

        def report_phase(phase: str, fraction: float, detail: str = "") -> None:
            report(Progress(phase=phase, fraction=fraction, folder=folder, detail=detail))

        executor = make(worker_config, report_phase)
        try:
            facts = executor.start()
            scheduler = Scheduler(config, facts, model.vocab_size)
            _log.info(describe(facts))
            return cls(make_ready(config, model, found, facts), scheduler, executor)
        except Exception:
            executor.stop()
            raise

    def stop(self) -> None:
        self._executor.stop()

    @property
    def sentinels(self) -> Sequence[int]:
        """Descriptors to watch while the engine is not busy. When one becomes readable, call `check`."""
        return self._executor.sentinels

    def check(self) -> None:
        """Raises ExecutorDead if no step can run any more."""
        self._executor.check()

    @property
    def busy(self) -> bool:
        """Whether step() has something to do or to return."""
        return bool(self._scheduler.live or self._in_flight or self._outputs)

    def stats(self) -> Stats:
        return self._scheduler.stats(time.monotonic())

    def add(self, client: int, request: Add) -> None:
        """Take a request in. Whatever happens, later steps return exactly one terminal answer to it."""
        if self._draining:
            answer = Failed(id=request.id, code=503, message="the engine is shutting down")
        else:
            answer = self._scheduler.add(client, request, time.monotonic())
        if answer is not None:
            self._collect({client: [answer]})

    def abort(self, client: int, ids: Iterable[int]) -> None:
        self._collect(self._scheduler.abort([(client, id) for id in ids], time.monotonic()))

    def abort_all(self, client: int | None = None) -> None:
        """End all requests of one client, or of all clients."""
        keys = [key for key in self._scheduler.live if client is None or key[0] == client]
        self._collect(self._scheduler.abort(keys, time.monotonic()))

    def drain(self) -> None:
        """Refuse requests from now on; those that are here run on."""
        self._draining = True

    def reset_prefix_cache(self) -> None:
        self._scheduler.cache.pool.withdraw_all()

    def step(self) -> OutputsByClient:
        """Plan a step if another one may be in flight, else wait for the oldest; returns all new outputs."""
        planned = None
        if self._scheduler.may_plan(len(self._in_flight)):
            planned = self._scheduler.schedule(time.monotonic())
        if planned is not None:
            self._in_flight.append((planned, self._executor.submit(planned.step)))
        if self._in_flight and (planned is None or not self._scheduler.may_plan(len(self._in_flight))):
            self._collect(self._finish(*self._in_flight.popleft()))
        return self.take_outputs()

    def take_outputs(self) -> OutputsByClient:
        """The outputs that are there without another step."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _finish(self, planned: PlannedStep, future: StepFuture) -> OutputsByClient:
        """Wait for a step and turn what it brings into outputs."""
        try:
            output = future.result()
        except ExecutorDead:
            raise
        except Exception:
            _log.exception("step %d failed; its %d requests end", planned.step.number, len(planned.seqs))
            return self._scheduler.fail(planned, _BROKEN, time.monotonic())
        return self._scheduler.update(planned, output, time.monotonic())

    def _collect(self, outputs: OutputsByClient) -> None:
        """Keep outputs until the next call of `step`, or its end."""
        for client, new in outputs.items():
            self._outputs.setdefault(client, []).extend(new)
