"""What a worker is told at start. None means "decide from the device"; WorkerFacts says what was decided."""

from __future__ import annotations

import msgspec

from models.config import ModelConfig
from models.conversion.served_as import Conversion
from models.pooling.config import PoolingConfig


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the ranks that hold one model together a worker is, and where it meets the others."""

    tensor_rank: int = 0
    tensor_size: int = 1
    """How many ranks share each layer."""
    stage: int = 0
    stages: int = 1
    """Into how many runs of layers the model is cut; the ranks of one stage hold one of them together."""
    local_rank: int = 0
    """Among all workers on this machine, those of other replicas too: tells which device is this one's."""
    local_ranks: int = 1
    """Workers that share this machine's cores and memory."""
    meeting: str = ""
    """Where the ranks find each other: file:///... on one machine, tcp://host:port across several."""
    address: str = "127.0.0.1"
    """Of this machine, as the other ranks reach it."""
    replica: int | None = None
    """Which of several models like this one they hold."""

    @property
    def rank(self) -> int:
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def size(self) -> int:
        return self.stages * self.tensor_size

    @property
    def answers(self) -> bool:
        """Whether this is the one rank whose outputs the engine reads: the first of the last stage."""
        return self.stage == self.stages - 1 and self.tensor_rank == 0

    @property
    def name(self) -> str:
        """Of a process that runs this worker alone, in its log."""
        own = f"rank {self.rank}" if self.size > 1 else "worker"
        return own if self.replica is None else f"engine {self.replica} {own}"


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
    """Of this worker; None: its share of the cores that may be used."""
    quantization: str | None = None
    """int8 | int8-dynamic | int4: what the linear layers' weights become when they are loaded."""
    seed: int = 0
    """Of dummy weights. What requests draw has seeds of its own (`Sampling.seed`)."""
    steps_ahead: int = 1
    """How many steps the engine may have planned beyond the one that runs; sizes the staging buffers."""
    place: Place = Place()
