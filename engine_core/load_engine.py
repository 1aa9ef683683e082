"""Loads an engine's model: its checkpoint is found, workers start, and a scheduler learns their facts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import Executor, InlineExecutor, MakeExecutor
from engine_core.features.experts.joint_steps import JointSteps
from engine_core.features.installed import make_scheduler
from engine_core.protocol import Progress, Ready
from engine_core.ranks.joint_executor import JointExecutor
from engine_core.ranks.layout import check_layout
from engine_core.ranks.ranks_executor import RanksExecutor, make_executor
from engine_core.resolve_checkpoint import (
    describe,
    find_checkpoint,
    find_drafter,
    make_ready,
    make_worker_config,
    with_own_adapters,
)
from engine_core.scheduling.scheduler import Scheduler
from engine_core.steps_in_flight import StepsInFlight
from models.config import read_config
from models.quantization.config import check_quantization
from worker.host.progress_page import StepProgress
from worker.worker_facts import TimedSteps

ReportProgress = Callable[[Progress], None]
"""A function that is called from any thread to say how far the start has come."""

Loaded = tuple[Ready, Scheduler, Executor]
"""The facts about a loaded model, what plans its steps, and what runs them."""

_log = logging.getLogger(__name__)


class ModelLoader(Protocol):
    """A function that loads a model. `timed_steps`: the times of its steps, if it was loaded before."""

    def __call__(self, timed_steps: TimedSteps = ()) -> Loaded: ...


def make_loader(
    config: EngineConfig,
    report: ReportProgress,
    make: MakeExecutor | None = None,
    expert_replicas: int = 1,
) -> ModelLoader:
    """Find a model and check its options -> a function that loads it, as often as it is called."""
    make = make or make_executor(ProcessConfig(engine=config, log_level="warning"))

    def report_download(fraction: float) -> None:
        report(Progress(phase="download", fraction=fraction))

    found = find_checkpoint(config, report_download)
    config = with_own_adapters(config, found)
    model = read_config(found, config.hf_overrides)
    check_quantization(model, config.worker.quantization)
    check_layout(config, model, expert_replicas)
    worker_config = make_worker_config(config, model, found)
    drafter = find_drafter(config, worker_config, expert_replicas, report_download)
    worker_config = replace(worker_config, drafter=drafter)
    folder = worker_config.folder
    report(Progress(phase="import", fraction=0.0, folder=folder))

    def report_phase(phase: str, fraction: float, detail: str = "") -> None:
        report(Progress(phase=phase, fraction=fraction, folder=folder, detail=detail))

    def load(timed_steps: TimedSteps = ()) -> Loaded:
        began = time.monotonic()
        executor = make(replace(worker_config, timed_steps=timed_steps), report_phase)
        try:
            facts = executor.start()
            own = executor.inner if isinstance(executor, JointExecutor) else executor
            disk = own.store if isinstance(own, InlineExecutor | RanksExecutor) else None
            scheduler = make_scheduler(config, facts, model.vocab_size, disk)
            _log.info(describe(facts))
            ready = make_ready(config, model, found, facts)
            return replace(ready, start_seconds=time.monotonic() - began), scheduler, executor
        except Exception:
            executor.stop()
            raise

    return load


def make_steps_in_flight(executor: Executor, progress: StepProgress, depth: int) -> StepsInFlight:
    """Make what keeps the steps that an executor runs, at most so many at a time."""
    if isinstance(executor, JointExecutor):
        return JointSteps(executor, progress, depth)
    return StepsInFlight(executor, progress, depth)
