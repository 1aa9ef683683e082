"""What a start decides from options and files alone, before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from engine_core.config import EngineConfig
from models.config import ConfigError, ModelConfig
from models.conversion.served_as import Conversion, resolve_conversion
from models.pooling.config import read_pooling
from worker.config import WorkerConfig
from worker.protocol import Task

TASKS: tuple[str, ...] = ("generate", *get_args(Task))


def worker_config(config: EngineConfig, model: ModelConfig, folder: Path) -> WorkerConfig:
    batched = config.max_num_batched_tokens
    if batched is None and not config.enable_chunked_prefill:
        batched = config.max_model_len or model.max_len  # a step must hold a whole prompt
    return WorkerConfig(
        folder=str(folder),
        model=model,
        device=config.device,
        dtype=config.dtype,
        conversion=_conversion(config, model, folder),
        pooling=read_pooling(folder, model, config.pooler_config),
        tasks=tuple(config.tasks),
        load_format=config.load_format,
        model_impl=config.model_impl,
        trust_remote_code=config.trust_remote_code,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=config.block_size,
        num_blocks=config.num_gpu_blocks_override,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        cpu_threads=config.cpu_threads,
        quantization=config.quantization,
        seed=config.seed,
        steps_ahead=config.depth - 1,
    )


def _conversion(config: EngineConfig, model: ModelConfig, folder: Path) -> Conversion:
    """Tasks say a runner, too: without generation among them no LM head is loaded."""
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
        model_impl=config.model_impl,
        trust_remote_code=config.trust_remote_code,
    )
