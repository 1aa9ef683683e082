"""What a worker is told at start. None means "decide from the device"; WorkerFacts says what was decided."""

from __future__ import annotations

import msgspec

from models.config import ModelConfig
from models.conversion.served_as import Conversion
from models.pooling.config import PoolingConfig
from worker.options import WorkerOptions


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
    """What the engine tells each of its workers: the operator's options, and what was decided from files."""

    options: WorkerOptions = WorkerOptions()
    folder: str
    """The checkpoint's folder on this machine."""
    model: ModelConfig
    conversion: Conversion
    """What the checkpoint is served as."""
    pooling: PoolingConfig = PoolingConfig()
    tasks: tuple[str, ...] = ()
    """Tasks to offer, of all that the model can do; empty: everything."""
    steps_ahead: int = 1
    """Steps that may be planned beyond the one that runs; sizes the staging buffers."""
    place: Place = Place()
