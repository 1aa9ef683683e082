"""What a worker is told at start. None means "decide from the device"; WorkerFacts says what was decided."""

from __future__ import annotations

import msgspec

from models.config import ModelConfig
from models.conversion import Conversion
from models.pooling_config import PoolingConfig


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    """The checkpoint's folder on this machine."""
    model: ModelConfig
    device: str = "auto"
    """auto | cpu | cuda"""
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16: auto is the checkpoint's own, float32 checkpoints included."""
    conversion: Conversion
    """What the checkpoint is served as."""
    pooling: PoolingConfig = PoolingConfig()
    tasks: tuple[str, ...] = ()
    """What is to be offered of all that this can do; empty: everything."""
    load_format: str = "auto"
    """auto | safetensors | pt | dummy"""
    model_impl: str = "auto"
    """auto | facet | transformers"""
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    cpu_threads: int | None = None
    seed: int = 0
    """Of dummy weights. What requests draw has seeds of its own (`Sampling.seed`)."""
    steps_ahead: int = 1
    """How many steps the engine may have planned beyond the one that runs; sizes the staging buffers."""
