"""An engine without its process: requests in, steps, outputs out. Knows no socket.

The offline LLM class drives it directly; engine_core/process.py drives it from the wire.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import Executor, ExecutorDead, MakeExecutor, Pending
from engine_core.protocol import Add, Failed, Progress, Ready, Stats
from engine_core.ranks.placement import choose
from engine_core.ready import describe, make_ready
from engine_core.scheduling.scheduler import OutputsByClient, Scheduler
from engine_core.scheduling.step import PlannedStep
from engine_core.startup import worker_config
from models.checkpoint.hub import resolve
from models.config import read_config
from models.parallel.shares import check_cut

Report = Callable[[Progress], None]
"""Told how far the start-up has come, from any thread."""

_BROKEN = "the engine failed while it computed this request"  # what exactly failed is for the log alone

_log = logging.getLogger(__name__)


class Engine:
    """A request is added for a client, a number that comes back as the key of its outputs."""

    def __init__(self, ready: Ready, scheduler: Scheduler, executor: Executor, depth: int) -> None:
        """`depth`: most steps in flight."""
        self.ready = ready
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._in_flight: deque[tuple[PlannedStep, Pending]] = deque()
        self._outputs: OutputsByClient = {}
        self._draining = False

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        report: Report,
        executor: MakeExecutor | None = None,
    ) -> Engine:
        """Find the model, load it, make room for its cache. Returns when a request can run.

        `executor` runs its steps; by default the one that the configuration asks for.
        """
        make_executor = executor or choose(ProcessConfig(engine=config, servers=[], log_level="warning"))
        found = resolve(
            config.model,
            config.revision,
            config.download_dir,
            lambda fraction: report(Progress(stage="download", fraction=fraction)),
            config.worker.load_format,
        )
        model = read_config(found, config.hf_overrides)
        check_cut(model, config.tensor_parallel_size, config.pipeline_parallel_size)
        told = worker_config(config, model, found)
        report(Progress(stage="import", fraction=0.0, folder=told.folder))

        def tell(stage: str, fraction: float, detail: str = "") -> None:
            report(Progress(stage=stage, fraction=fraction, folder=told.folder, detail=detail))

        worker = make_executor(told, tell)
        try:
            facts = worker.start()
            scheduler = Scheduler(config, facts, model.vocab_size)
            _log.info(describe(facts))
            return cls(make_ready(config, model, found, facts), scheduler, worker, config.depth)
        except Exception:
            worker.stop()
            raise

    def stop(self) -> None:
        self._executor.stop()

    @property
    def sentinels(self) -> Sequence[int]:
        """Descriptors to watch while it is not busy: if one becomes readable, `check`."""
        return self._executor.sentinels

    def check(self) -> None:
        """Raises ExecutorDead if no step can run any more."""
        self._executor.check()

    @property
    def busy(self) -> bool:
        """Whether step() has something to do or to tell."""
        return bool(self._scheduler.live or self._in_flight or self._outputs)

    def stats(self) -> Stats:
        return self._scheduler.stats()

    def add(self, client: int, request: Add) -> None:
        """Whatever happens, the outputs of later steps hold exactly one terminal answer to it."""
        if self._draining:
            failed = Failed(id=request.id, code=503, message="the engine is shutting down")
        else:
            failed = self._scheduler.add(client, request, time.monotonic())
        if failed is not None:
            self._tell({client: [failed]})

    def abort(self, client: int, ids: Iterable[int]) -> None:
        self._tell(self._scheduler.abort([(client, id) for id in ids], time.monotonic()))

    def abort_all(self, client: int | None = None) -> None:
        """Of one client, or of all."""
        keys = [key for key in self._scheduler.live if client is None or key[0] == client]
        self._tell(self._scheduler.abort(keys, time.monotonic()))

    def drain(self) -> None:
        """From now on requests are refused; those that are here run on."""
        self._draining = True

    def reset_prefix_cache(self) -> None:
        self._scheduler.cache.pool.withdraw_all()

    def step(self) -> OutputsByClient:
        """Keep as many steps in flight as there may be; return what there is to tell."""
        full = len(self._in_flight) >= self._depth
        plan = None if full else self._scheduler.schedule(time.monotonic())
        if plan is not None:
            self._in_flight.append((plan, self._executor.submit(plan.step)))
        if len(self._in_flight) >= self._depth or (self._in_flight and plan is None):
            self._tell(self._land(*self._in_flight.popleft()))
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _land(self, plan: PlannedStep, pending: Pending) -> OutputsByClient:
        try:
            output = pending.result()
        except ExecutorDead:
            raise
        except Exception:
            _log.exception("step %d failed; its %d requests end", plan.step.number, len(plan.seqs))
            return self._scheduler.fail(plan, _BROKEN)
        return self._scheduler.update(plan, output, time.monotonic())

    def _tell(self, outputs: OutputsByClient) -> None:
        for client, told in outputs.items():
            self._outputs.setdefault(client, []).extend(told)
