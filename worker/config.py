"""The configuration that an engine gives each of its workers; WorkerFacts says what the worker decided."""

from __future__ import annotations

import msgspec

from models.config import ModelConfig
from models.conversion.conversion_choice import Conversion
from models.parallel.experts import Placement, Transport
from models.plugins import Registrations
from models.pooling.config import PoolingConfig
from worker.options import WorkerOptions


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a worker among the ranks that hold one model together, and where it finds the others."""

    tensor_rank: int = 0
    tensor_size: int = 1
    """The number of ranks that share each layer."""
    stage: int = 0
    stages: int = 1
    """The number of runs of layers into which the model is cut; the ranks of one stage hold one of them."""
    local_rank: int = 0
    """The number of this worker on its machine, those of other replicas counted: the number of its device."""
    local_ranks: int = 1
    """The number of workers that share this machine's cores and memory."""
    rendezvous: str = ""
    """The address at which ranks find each other: file:///... on one machine, tcp://host:port on several."""
    address: str = "127.0.0.1"
    """The address at which the other ranks reach this machine."""
    replica: int | None = None
    """The number of the replica to which these ranks belong, if there are several."""
    expert_rank: int = 0
    expert_size: int = 1
    """The number of ranks that share whole experts; 1: each rank has a piece of every expert."""
    expert_placement: Placement = "linear"
    expert_transport: Transport = "allgather_reducescatter"
    expert_replicas: int = 1
    """The number of replicas that share whole experts; they take every step together."""
    expert_rendezvous: str = ""
    """The address at which ranks of all these replicas find each other."""

    @property
    def rank(self) -> int:
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def size(self) -> int:
        return self.stages * self.tensor_size

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part in what this one computes."""
        return self.size == 1 and self.expert_replicas == 1

    @property
    def returns_outputs(self) -> bool:
        """Whether the engine reads outputs from this rank, the first one of the last stage."""
        return self.stage == self.stages - 1 and self.tensor_rank == 0

    @property
    def name(self) -> str:
        """The name of a process that runs this worker alone, as its log shows it."""
        own = f"rank {self.rank}" if self.size > 1 else "worker"
        return own if self.replica is None else f"engine {self.replica} {own}"


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter: a model that guesses what the served one will sample."""

    folder: str
    """The folder of its checkpoint on this machine."""
    model: ModelConfig
    conversion: Conversion | None
    """None: it is no whole model, but reads the hidden states of the served one."""
    method: str
    """The way in which it guesses, as `--speculative-config` names it."""
    most: int
    """The most tokens that it guesses for a sequence at a time."""
    drawn: bool = False
    """Whether guesses are drawn by the request's own options and random numbers; else the likeliest tokens
    are guessed."""
    whole: bool = False
    """Whether each rank holds all of it, and not a piece."""

    @property
    def embeds(self) -> bool:
        """Whether it may embed tokens by the served model's matrix: layers that read hidden states do."""
        return self.conversion is None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's options for a worker, and facts that the engine has found in the checkpoint's files."""

    options: WorkerOptions = WorkerOptions()
    folder: str
    """The checkpoint's folder on this machine."""
    model: ModelConfig
    conversion: Conversion
    """The kind of model that the checkpoint is served as."""
    pooling: PoolingConfig = PoolingConfig()
    tasks: tuple[str, ...] = ()
    """Tasks to offer, of all that the model can do; empty: everything."""
    whole_prompts: bool = False
    """Whether each step must have room for a whole prompt, because none is read in pieces."""
    steps_ahead: int = 1
    """Steps that may be planned beyond the one that runs; sizes the staging buffers."""
    place: Place = Place()
    registrations: Registrations = Registrations()
    """Classes of models that the program has registered."""
    guesses: bool = False
    """Whether steps may have guesses, of which layers with states keep something."""
    drafter: DrafterConfig | None = None
    timed_steps: tuple[tuple[int, float], ...] = ()
    """The steps that an earlier worker of this configuration was timed with: a CPU then runs none again."""
    run_folder: str = ""
    """A folder of this run alone, where a worker leaves a note for the one after it; "" means none."""
    most_cache_bytes: int | None = None
    """The most bytes of all caches on a machine, or of those on a card, where the operator does not say how
    many; None: the device decides."""
