"""The options of an engine's workers, which follow from its own options and the checkpoint's files alone."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from engine_core.config import TASKS, EngineConfig
from models.config import ConfigError, ModelConfig
from models.conversion.served_as import Conversion, resolve_conversion
from models.plugins import registrations
from models.pooling.config import read_pooling
from worker.config import WorkerConfig


def make_worker_config(config: EngineConfig, model: ModelConfig, folder: Path) -> WorkerConfig:
    options = config.worker
    if options.max_num_batched_tokens is None and not config.enable_chunked_prefill:
        whole_prompt = options.max_model_len or model.max_len  # which each step must be able to hold
        options = replace(options, max_num_batched_tokens=whole_prompt)
    return WorkerConfig(
        options=options,
        folder=str(folder),
        model=model,
        conversion=_conversion(config, model, folder),
        pooling=read_pooling(folder, model, config.pooler_config),
        tasks=tuple(config.tasks),
        steps_ahead=config.depth - 1,
        registrations=registrations(),
    )


def _conversion(config: EngineConfig, model: ModelConfig, folder: Path) -> Conversion:
    """The conversion of the checkpoint. Tasks imply a runner: without generation no LM head is loaded."""
    if unknown := [task for task in config.tasks if task not in TASKS]:
        raise ConfigError(f"--tasks: no task {unknown[0]!r}; there are {', '.join(TASKS)}")
    runner = config.runner
    if runner == "auto" and config.tasks:
        runner = "generate" if "generate" in config.tasks else "pooling"
    return resolve_conversion(
        model,
        folder,
        runner=runner,
        convert=config.convert,
        model_impl=config.worker.model_impl,
        trust_remote_code=config.worker.trust_remote_code,
    )
