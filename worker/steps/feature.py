"""The contract between the worker's core and its features: the moments at which the core calls them.

A feature is an optional capability: a class in a folder of `worker/features/` that overrides the hooks it
needs. `worker/features/installed.py` chooses those that a model with its options has, in the order in which
they are called. The core keeps, for each hook, those that override it, so a feature that is not there costs
no call. A feature knows the core, and no other feature; what it has to know of a slot, it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor

from models.context import ForwardContext
from models.layers.attention import CachedAttention
from models.model import Forward
from worker.cache_tiers.record_memory import BlockMemory
from worker.cache_tiers.tiered_store import Store
from worker.capacity import CacheBudget, WorkerLimits
from worker.protocol import NewSeq, StepInput
from worker.sampling.sampler import SampleTargets
from worker.steps.batch import Batch, Launched, Outcome, Pool, Tell
from worker.tables.positions import Columns, LayOut, Read
from worker.tables.slots import Slots
from worker.tables.staging import Packet
from worker.worker_facts import WorkerFacts


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of the memory for caches that a feature takes."""

    limits: WorkerLimits
    """The sizes of steps, which may have become smaller."""
    nbytes: int = 0
    name: str = ""
    """The name of this memory in the table of memory."""


@dataclass(frozen=True, slots=True)
class AddedRows:
    """A step to which a feature has added rows, in each of which one more token is computed and sampled."""

    step: StepInput
    texts: Sequence[tuple[int, int, Sequence[int]]]
    """The tokens of these rows: the slot, the position of the first, and the tokens."""
    tell: Tell
    """The function that makes an output for the rows of the engine's step from one for all rows."""


class Passes(Protocol):
    """The type of forward passes beside those of the served model, which a device may record."""

    def make_stream(self, tokens: int) -> Tensor | None:
        """Make the place of what a pass of so many tokens reads beside their ids; None: nothing."""
        ...

    def quicken(self, lay_out: LayOut, record: Callable[[Forward], Forward] | None) -> None:
        """Use the device's layout of steps, and let forward passes of small steps be replayed if they can."""
        ...


class Feature:
    """The base of features. Each hook does nothing unless a feature overrides it."""

    # A worker opens.

    def weights(self) -> Iterable[Tensor]:
        """Return the weights that the feature has loaded."""
        return ()

    def attention_layers(self) -> Sequence[CachedAttention]:
        """Return layers that have entries in the cache beside those of the served model."""
        return ()

    def reads_whole(self) -> bool:
        """Say whether a prompt must be computed in one step."""
        return False

    def keeps_all_blocks(self) -> bool:
        """Say whether the blocks of all positions are read, though layers have windows."""
        return False

    def step_bytes(self, limits: WorkerLimits) -> int:
        """Tell how many bytes a step takes because of the feature, at most."""
        return 0

    def take(self, limits: WorkerLimits, budget: CacheBudget) -> Taken:
        """Decide what part of the memory for caches the feature takes, and tell it."""
        return Taken(limits)

    def block_bytes(self, longest: int) -> int:
        """Tell the bytes that are kept for each cache block. The longest sequence has `longest` blocks."""
        return 0

    def open(self, limits: WorkerLimits, slots: Slots, blocks: int) -> Sequence[Tensor]:
        """Take memory; returns parts [blocks + 1, ...] of what is kept of each cache block."""
        return ()

    def open_store(self, facts: WorkerFacts, blocks: BlockMemory) -> Store | None:
        """Open what keeps records of the cache elsewhere; None: nothing does."""

    def add_facts(self, facts: WorkerFacts) -> WorkerFacts:
        """Complete what the worker tells of itself."""
        return facts

    def warm_up(self, steps: list[StepInput]) -> list[StepInput]:
        """Do what is slow when it is done for the first time, and complete the first steps."""
        return steps

    def begin(self) -> None:
        """Begin work beside steps: the first steps are done, and requests follow."""

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return the methods, by name, that an engine may call between steps."""
        return {}

    def passes(self) -> Passes:
        """Return forward passes of the feature, which a device may record as it records the model's."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads, and give memory of the host back."""

    # A step begins, and is planned.

    def before(self, step: StepInput) -> None:
        """Do what comes before a step."""

    def admit(self, new: NewSeq) -> None:
        """Note a sequence that has got a slot."""

    def add_rows(self, step: StepInput) -> AddedRows | None:
        """Give a step the rows that it asks for; None: it asks for none. Raise ValueError if for too many.

        It is called for steps with rows that have guesses, or for which some are to be made.
        """

    def read(self, columns: Columns, step: StepInput) -> Sequence[Read]:
        """Tell what a step, given as the engine sent it, reads beside tokens because of the feature."""
        return ()

    def plan_pools(self, columns: Columns, packet: Packet) -> Sequence[Pool]:
        """Send what the feature pools with behind the model, and return the function that does.

        It is called for steps that complete texts to be pooled (`Columns.pooling`).
        """
        return ()

    # A step is computed.

    def keep(self, hidden: Tensor, step: ForwardContext) -> None:
        """Keep what is read later of the last hidden states [T, H]. Recordings have it in them."""

    def before_logits(self, step: ForwardContext, chosen: Tensor | slice | None) -> None:
        """Prepare the LM head for the chosen tokens of a step, or all."""

    def forbid(self, logits: Tensor, batch: Batch) -> None:
        """Forbid tokens in logits [R, V], in place."""

    def process(self, logits: Tensor, targets: SampleTargets, last: Tensor) -> Mapping[int, str]:
        """Change logits [R, V] behind `last` tokens [R], in place; returns row -> why it samples nothing."""
        return {}

    def follow(self, batch: Batch, ids: Tensor, step: ForwardContext, outcome: Outcome) -> Outcome:
        """Compute what follows a step of these tokens [T], whose new tokens are in the table."""
        return outcome

    def finish(self, step: StepInput, launched: Launched) -> Launched:
        """Do what a step is followed by, before another one begins."""
        return launched


_P = ParamSpec("_P")
_R = TypeVar("_R")


class Hooks:
    """For each moment, the hooks of the features that do something then, in their order."""

    def __init__(self, features: Iterable[Feature] = ()) -> None:
        self.features = tuple(features)
        self.weights = self._overriding(Feature.weights)
        self.attention_layers = self._overriding(Feature.attention_layers)
        self.reads_whole = self._overriding(Feature.reads_whole)
        self.keeps_all_blocks = self._overriding(Feature.keeps_all_blocks)
        self.step_bytes = self._overriding(Feature.step_bytes)
        self.take = self._overriding(Feature.take)
        self.block_bytes = self._overriding(Feature.block_bytes)
        self.open = self._overriding(Feature.open)
        self.open_store = self._overriding(Feature.open_store)
        self.add_facts = self._overriding(Feature.add_facts)
        self.warm_up = self._overriding(Feature.warm_up)
        self.begin = self._overriding(Feature.begin)
        self.methods = self._overriding(Feature.methods)
        self.passes = self._overriding(Feature.passes)
        self.close = self._overriding(Feature.close)
        self.before = self._overriding(Feature.before)
        self.admit = self._overriding(Feature.admit)
        self.add_rows = self._overriding(Feature.add_rows)
        self.read = self._overriding(Feature.read)
        self.plan_pools = self._overriding(Feature.plan_pools)
        self.keep = self._overriding(Feature.keep)
        self.before_logits = self._overriding(Feature.before_logits)
        self.forbid = self._overriding(Feature.forbid)
        self.process = self._overriding(Feature.process)
        self.follow = self._overriding(Feature.follow)
        self.finish = self._overriding(Feature.finish)

    def _overriding(self, hook: Callable[Concatenate[Any, _P], _R]) -> tuple[Callable[_P, _R], ...]:
        name = hook.__name__
        return tuple(getattr(each, name) for each in self.features if getattr(type(each), name) is not hook)
