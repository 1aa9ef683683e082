"""Loads an engine's model: its checkpoint is found, workers start, and a scheduler learns their facts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

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
    find_checkpoint,
    find_drafter,
    make_worker_config,
    with_own_adapters,
)
from engine_core.scheduling.scheduler import Scheduler
from engine_core.steps_in_flight import StepsInFlight
from models.config import ModelConfig, read_config
from models.quantization.config import check_quantization, describe_quantization
from worker.host.progress_page import StepProgress
from worker.worker_facts import TimedSteps, WorkerFacts

ReportProgress = Callable[[Progress], None]
"""A function that is called from any thread to say how far the start has come."""

Loaded = tuple[Ready, Scheduler, Executor]
"""The facts about a loaded model, what plans its steps, and what runs them."""

_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

_log = logging.getLogger(__name__)


class ModelLoader:
    """Loads a model, as often as it is called."""

    def __init__(
        self,
        config: EngineConfig,
        report: ReportProgress,
        make: MakeExecutor | None = None,
        expert_replicas: int = 1,
    ) -> None:
        """Find the model and check its options."""
        self._make = make or make_executor(ProcessConfig(engine=config, log_level="warning"))
        self._report, self._expert_replicas = report, expert_replicas

        def report_download(fraction: float) -> None:
            report(Progress(phase="download", fraction=fraction))

        self._found = find_checkpoint(config, report_download)
        self._config = config = with_own_adapters(config, self._found)
        self._model = read_config(self._found, config.hf_overrides)
        check_quantization(self._model, config.worker.quantization)
        check_layout(config, self._model, expert_replicas)
        worker = make_worker_config(config, self._model, self._found)
        drafter = find_drafter(config, worker, expert_replicas, report_download)
        self._worker = replace(worker, drafter=drafter)
        self.folder = self._worker.folder
        """The folder from which it is loaded."""
        report(Progress(phase="import", fraction=0.0, folder=self.folder))

    def __call__(self, timed_steps: TimedSteps = ()) -> Loaded:
        """Load the model. `timed_steps`: the times of its steps, if it was loaded before."""
        began = time.monotonic()
        executor = self._make(replace(self._worker, timed_steps=timed_steps), self._report_phase)
        try:
            facts = executor.start()
            own = executor.inner if isinstance(executor, JointExecutor) else executor
            disk = own.store if isinstance(own, InlineExecutor | RanksExecutor) else None
            scheduler = make_scheduler(self._config, facts, self._model.vocab_size, disk)
            _log.info(_describe(facts))
            ready = _make_ready(self._config, self._model, self._found, facts)
            return replace(ready, start_seconds=time.monotonic() - began), scheduler, executor
        except Exception:
            executor.stop()
            raise

    def at(self, folder: str, facts: WorkerFacts) -> ModelLoader:
        """Find other weights of the model in a folder, to be loaded as these were, with these facts.

        Raises ValueError or OSError if it is another model there, which is served as something else.
        """
        config = self._config
        if self._expert_replicas > 1 or config.nnodes > 1:
            raise ValueError("weights are replaced on one machine, without shared experts: start it again")
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} is not a folder on the engine's machine")
        form = "auto" if config.worker.load_format == "dummy" else config.worker.load_format
        worker = replace(
            config.worker, load_format=form, dtype=facts.dtype, max_model_len=facts.max_model_len
        )
        changed = replace(config, model=folder, revision=None, worker=worker)
        other = ModelLoader(changed, lambda _: None, self._make, self._expert_replicas)
        for name in ("architecture", "quantization", *_SIZES):
            if (asked := getattr(other._model, name)) != (own := getattr(self._model, name)):
                raise ValueError(f"its {name} is {asked}, and that of the model that is served {own}")
        if other._worker.conversion != self._worker.conversion:
            raise ValueError("it would be served as something else: its files say other tasks or heads")
        return other

    def _report_phase(self, phase: str, fraction: float, detail: str = "") -> None:
        self._report(Progress(phase=phase, fraction=fraction, folder=self.folder, detail=detail))


def make_steps_in_flight(
    executor: Executor, progress: StepProgress, depth: int, *, may_run_here: bool
) -> StepsInFlight:
    """Make what keeps the steps that an executor runs, at most so many at a time.

    `may_run_here`: whether the calling thread may run some, as no exception interrupts it.
    """
    if isinstance(executor, JointExecutor):
        return JointSteps(executor, progress, depth)
    if may_run_here and isinstance(executor, InlineExecutor):
        return StepsInFlight(executor, progress, depth, executor.submit_here)
    return StepsInFlight(executor, progress, depth)


def _make_ready(config: EngineConfig, model: ModelConfig, folder: Path, facts: WorkerFacts) -> Ready:
    return Ready(
        model=config.model,
        folder=str(folder),
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        enable_prefix_caching=config.enable_prefix_caching and facts.causal,
        scheduling_policy=config.scheduling_policy,
        quantization=describe_quantization(model, config.worker.quantization),
        worker=facts,
    )


def _describe(facts: WorkerFacts) -> str:
    """A sentence for the log: device, type, weights, what the cache holds, and tasks."""
    mapped = f" ({_size(facts.mapped_bytes)} mapped as packed before)" if facts.mapped_bytes else ""
    return (
        f"ready on {facts.device} in {facts.dtype}: {_size(facts.weight_bytes)} of weights{mapped}, "
        f"{_cache(facts)}, tasks {', '.join(facts.tasks)}"
    )


def _cache(facts: WorkerFacts) -> str:
    if not facts.causal:
        return f"no KV cache (texts of up to {facts.max_model_len} tokens)"
    tokens = facts.cached_tokens
    requests = tokens / facts.max_model_len
    each = _size(facts.kv_bytes // max(1, tokens))
    return (
        f"{_size(facts.kv_bytes)} of KV cache ({tokens} tokens of {each}, {requests:.1f} requests of "
        f"the full context length {facts.max_model_len})"
    )


def _size(count: float) -> str:
    """A number of bytes in the largest unit of which there is at least one."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count} {_UNITS[0]}"
