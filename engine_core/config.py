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
    quantization: str | None = None
    max_model_len: int | None = None
    seed: int = 0

    # the device and its memory
    device: str = "auto"
    cpu_threads: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None

    # its workers
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    """uni | mp | ray; None: uni for one worker, mp for more."""
    nnodes: int = 1
    """Machines over which the workers of one engine are spread, without Ray."""
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    """Of the machine with node_rank 0, as the others reach it."""
    master_port: int = 29501
    cluster_key: str | None = None
    """A secret that all machines know: whoever has it may join."""

    # the scheduler
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    steps_ahead: int = 1

    @property
    def ranks(self) -> int:
        """Workers that hold the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def depth(self) -> int:
        """Most steps in flight: as many stages of the model as there are can work at the same time."""
        return max(self.steps_ahead + 1, self.pipeline_parallel_size)


class Address(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where one API server listens for its engines: two ZMQ endpoints.

    They lie in the run's private folder, or can be reached from other machines; those take a secret.
    """

    requests: str
    answers: str
    secret: str | None = None


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that serve one model together: how many, which of them run here, where the others call."""

    size: int = 1
    first: int = 0
    """Number of the first one on this machine."""
    here: int = 1
    address: str = "127.0.0.1"
    """Of the machine with the API servers."""
    port: int = 29550
    secret: str | None = None

    @property
    def local(self) -> range:
        return range(self.first, self.first + self.here)

    @property
    def elsewhere(self) -> bool:
        """Whether any run on other machines."""
        return self.here < self.size

    def door(self, server: int) -> Address:
        """Where an API server listens for engines of other machines."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        port = self.port + 2 * server
        return Address(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}", self.secret)


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is told at its start, through the pipe it shares with its parent."""

    engine: EngineConfig
    servers: list[Address]
    index: int = 0
    """Of this engine among all replicas."""
    alone: bool = True
    """Whether it is the only one."""
    local_index: int = 0
    local_engines: int = 1
    """Its place among the replicas on this machine, which share its devices and cores."""
    folder: str | None = None
    """Private to this run: what its workers share may lie there, and goes when the run ends."""
    drain_seconds: float = 0.0
    """How long SIGTERM lets requests run on."""
    log_level: str = "info"
