"""What the operator asked of an engine. None means "decide at start from the model and the device"."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    # the model
    model: str
    """A folder, a hub id, or "demo" for the built-in model."""
    revision: str | None = None
    download_dir: str | None = None
    hf_overrides: dict[str, object] = {}
    runner: str = "auto"
    convert: str = "auto"
    tasks: list[str] = []
    """What to offer, of "generate" and worker.protocol.Task; empty: all that the model does."""
    pooler_config: dict[str, object] = {}
    trust_remote_code: bool = False
    load_format: str = "auto"
    model_impl: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0

    # the device and its memory
    device: str = "auto"
    cpu_threads: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None

    # the scheduler
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    steps_ahead: int = 1


class Address(msgspec.Struct, frozen=True):
    """Where one API server listens for its engines: two ZMQ endpoints in the run's private folder."""

    requests: str
    answers: str


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is told at its start, through the pipe it shares with its parent."""

    engine: EngineConfig
    servers: list[Address]
    index: int = 0
    drain_seconds: float = 0.0
    """How long SIGTERM lets requests run on."""
    log_level: str = "info"
