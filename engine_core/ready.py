"""The facts of an engine that is ready, for its servers, and a sentence about them for people."""

from __future__ import annotations

from pathlib import Path

from engine_core.config import EngineConfig
from engine_core.protocol import Ready
from models.config import ModelConfig
from models.quantization.config import describe_quantization
from worker.protocol import WorkerFacts

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def make_ready(config: EngineConfig, model: ModelConfig, folder: Path, facts: WorkerFacts) -> Ready:
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


def describe(facts: WorkerFacts) -> str:
    """A sentence for the log: device, type, weights, what the cache holds, and tasks."""
    return (
        f"ready on {facts.device} in {facts.dtype}: {_size(facts.weight_bytes)} of weights, {_cache(facts)}, "
        f"tasks {', '.join(facts.tasks)}"
    )


def _cache(facts: WorkerFacts) -> str:
    if not facts.causal:
        return f"no KV cache (texts of up to {facts.max_model_len} tokens)"
    tokens = facts.num_blocks * facts.block_size
    requests = tokens / facts.max_model_len
    each = _size(facts.kv_bytes // max(1, tokens))
    return (
        f"{_size(facts.kv_bytes)} of KV cache ({tokens} tokens of {each}, {requests:.1f} requests of the "
        f"full {facts.max_model_len})"
    )


def _size(count: float) -> str:
    """A number of bytes in the largest unit of which there is at least one."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count} {_UNITS[0]}"
