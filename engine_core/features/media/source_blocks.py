"""The sources of live sequences, and the blocks in which the worker holds their keys and values.

Equal sources, by hash and salt, are encoded once: their blocks are found as long as nobody needs the room,
all of them or none. A sequence holds those of its source from admission to its end or preemption; what the
encoder reads stays until it ends, so that it can be encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.engine_stats import Stats
from engine_core.features.media.media_checks import bad_source
from engine_core.protocol import AddRequest, Source
from engine_core.scheduling.cache.block_pool import BlockPool
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.sequence import Place, Sequence, chain_hash, own_salt, root_hash
from worker.protocol import EncodeSource, NewSeq
from worker.worker_facts import WorkerFacts

_MOST_BYTES = 1 << 30
"""The bytes that features of live requests may take, unless a single one has more."""


@dataclass(slots=True)
class _Held:
    source: Source
    users: int = 0


@dataclass(slots=True)
class _Begun:
    """A source of which steps have computed some layers of the encoder."""

    add: AddRequest
    """The request for which it was begun."""
    source: Source
    blocks: list[int]
    """Blocks that nobody finds before all layers are planned."""
    done: int = 0


class SourceBlocks(Feature):
    """Decides which sources a step encodes, and into which blocks."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts, vocab_size: int) -> None:
        self._facts, self._vocab_size = facts, vocab_size
        self.pool = BlockPool(facts.num_source_blocks)
        self._held: dict[Sequence, list[int]] = {}
        """The blocks of the source of each sequence that runs."""
        self.encoded = self.reused = 0
        """How many sources were encoded, and how often a sequence has found one that was, in total."""
        self.bytes = 0
        """The bytes of the features of all live requests."""
        self._caches = config.enable_prefix_caching
        self._size = facts.block_size
        splits = self._caches and config.enable_chunked_prefill and facts.cuts_prompts
        self._layers = facts.source_layers if splits else 0
        self._begun: _Begun | None = None
        self._per_step = config.max_num_encoder_input_tokens or facts.max_num_batched_tokens
        self._gave_way = self._gives_way = False
        """Whether layers were put off because prompts had filled a step: the last one, and this one."""
        self.encoding: list[EncodeSource] = []
        self.layers = 0
        """What the step that is being planned encodes, and how many layers of a source that is begun."""
        self._left: float = self._per_step
        """The positions that the step that is being planned can still encode."""
        self._live: dict[str, _Held] = {}

    # Requests come and go.

    def refuse(self, add: AddRequest) -> str | None:
        return bad_source(add, self._facts, self._vocab_size)

    def lacks_room(self, add: AddRequest) -> str | None:
        """Say whether what encoders of live requests read would take too many bytes with that of this one."""
        source = add.source
        if source is None or source.hash in self._live or not self.bytes:
            return None
        too_many = self.bytes + _bytes(source) > _MOST_BYTES
        return "other requests have too many media" if too_many else None

    def enter(self, seq: Sequence) -> None:
        """Take in a request, which gets a salt by which it shares nothing with other sources."""
        add = seq.request
        if (source := add.source) is None:
            return
        seq.keeps_place = True  # sources are encoded in the order of requests, a few layers in each step
        held = self._live.get(source.hash)
        if held is None:
            held = self._live[source.hash] = _Held(source)
            self.bytes += _bytes(source)
        held.users += 1
        salt = own_salt(add.salt, [], [(source.hash.encode(), source.length)])
        seq.request = replace(add, source=replace(source, features=held.source.features), salt=salt)

    def leave(self, seq: Sequence) -> None:
        """Note that a request has ended: features that no other one needs are dropped."""
        if (source := seq.request.source) is None:
            return
        held = self._live[source.hash]
        held.users -= 1
        if not held.users:
            self.bytes -= _bytes(source)
            del self._live[source.hash]
            if self._begun is not None and self._begun.source.hash == source.hash:
                self._drop_begun()

    # A step is planned.

    def begin_step(self) -> None:
        """Plan another step, which encodes nothing yet."""
        self.encoding, self.layers, self._left = [], 0, self._per_step
        self._gave_way, self._gives_way = self._gives_way, False

    def fits(self, seq: Sequence) -> bool:
        """Say whether the blocks of a sequence's source are there, or there is room for them."""
        add = seq.request
        source, begun = add.source, self._begun
        if source is None or self._find(add, source) is not None:
            return True
        return self._count(source) <= self.pool.free + (len(begun.blocks) if begun else 0)

    def reach(self, seq: Sequence, start: int, count: int, step: StepBuilder) -> int:
        """Return `count` if the source is encoded, or can be in this step; else layers that fit are added."""
        if seq.place is Place.RUNNING or seq.request.source is None:
            return count
        fitting = step.fitting
        if self._may_begin(seq.request, fitting):
            return count
        if fitting < inf:
            step.encode(self._encode_partly(seq.request, step))
        return 0

    def _may_begin(self, add: AddRequest, fitting: float) -> bool:
        """Whether a request's source is encoded, or the step has room to encode what is left of it: in its
        budget, and in the positions that are `fitting` into its time. The first one of a step need not fit
        into the budget, nor, where its layers cannot be divided among steps, into the time."""
        if (source := add.source) is None or self._find(add, source) is not None:
            return True
        begun = self._is_begun(add)
        if fitting < inf and (self._begun is not None) != begun:
            return False  # another one comes first
        work, first = self._work(source, begun), not (self.encoding or self.layers)
        if begun and self.layers:
            return False
        return (first or work <= self._left) and (work <= fitting or (first and not self._layers))

    def _encode_partly(self, add: AddRequest, step: StepBuilder) -> float:
        """Have layers of the encoder computed for the source of a request that may not begin, as many as fit,
        or for the one that is begun, for which others wait. Returns the positions that they are worth. One is
        computed though it does not fit, but gives way once to prompts that have filled the step. The step
        must have rows, or it might not be run."""
        if not self._layers or self.layers or add.source is None:
            return 0.0
        source, done = (begun.source, begun.done) if (begun := self._begun) else (add.source, 0)
        least = int(not self.encoding and (self._gave_way or not step.has_prefill))
        layers = min(max(least, int(step.fitting * self._layers / source.length)), self._layers - done)
        self._gives_way = not layers
        if not layers or (begun is None and self._count(source) > self.pool.free):
            return 0.0
        if begun is None:
            begun = self._begun = _Begun(add, source, self.pool.take(self._count(source)))
            told = EncodeSource(source.tokens, source.features, source.length, begun.blocks, partly=True)
            self.encoding.append(told)
        begun.done += layers
        self.layers = layers
        if begun.done == self._layers:
            self._publish(begun.add, source, begun.blocks)
            self._drop_begun()  # it is found by its name
            self.encoded += 1
        return source.length * layers / self._layers

    def admit(self, seq: Sequence, new: NewSeq, step: StepBuilder) -> NewSeq:
        """Tell where the source of a sequence lies, which the step encodes if no other one has."""
        if (source := seq.request.source) is None:
            return new
        blocks, positions = self._take(seq.request, source)
        self._held[seq] = blocks
        if positions:
            step.encode(positions)
        return replace(new, source_blocks=blocks, source_len=source.length)

    def release(self, seq: Sequence) -> None:
        self.pool.release(self._held.pop(seq, []))

    def finish(self, step: StepBuilder) -> None:
        if self.encoding or self.layers:
            step.told |= {"sources": self.encoding, "source_layers": self.layers}

    def add_stats(self, stats: Stats) -> Stats:
        return replace(
            stats,
            media_encoded=stats.media_encoded + self.encoded,
            media_reused=stats.media_reused + self.reused,
            media_bytes=stats.media_bytes + self.bytes,
        )

    def _take(self, add: AddRequest, source: Source) -> tuple[list[int], float]:
        """The blocks of a request's source, and how many of its positions the step has to encode for it."""
        begun = self._begun
        if (found := self._find(add, source)) is not None:
            self.pool.share(found)
            self.reused += 1
            return found, 0
        self.encoded += 1
        if begun is not None and self._is_begun(add):
            blocks, work, self._begun = begun.blocks, self._work(source, begun=True), None
            self.layers = self._layers - begun.done
        else:
            if self._count(source) > self.pool.free:
                self._drop_begun()
            blocks, work = self.pool.take(self._count(source)), source.length
            self.encoding.append(EncodeSource(source.tokens, source.features, source.length, blocks))
        self._publish(add, source, blocks)
        self._left -= work
        return blocks, work

    def fail_step(self, planned: PlannedStep, again: list[Sequence], behind: bool) -> None:
        """Note that a step has failed, which may have been to encode what is published or begun."""
        self._drop_begun()
        self.pool.withdraw_all()

    def forget_prefixes(self) -> None:
        self._drop_begun()
        self.pool.withdraw_all()

    def _publish(self, add: AddRequest, source: Source, blocks: list[int]) -> None:
        for block, name in zip(blocks, self._names(add, source), strict=True):
            self.pool.publish(block, name)

    def _is_begun(self, add: AddRequest) -> bool:
        return self._begun is not None and self._begun.add.salt == add.salt  # which tells the source, too

    def _work(self, source: Source, begun: bool) -> float:
        """The positions of a source that are still to be computed."""
        done = self._begun.done if self._begun and begun else 0
        return source.length * (1 - done / self._layers) if done else source.length

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self.pool.release(self._begun.blocks)
            self._begun = None

    def _count(self, source: Source) -> int:
        return -(-source.length // self._size)

    def _find(self, add: AddRequest, source: Source) -> list[int] | None:
        if not self._caches:
            return None
        blocks = [self.pool.find(name) for name in self._names(add, source)]
        return [block for block in blocks if block is not None] if None not in blocks else None

    def _names(self, add: AddRequest, source: Source) -> list[bytes]:
        root = root_hash(add.salt)  # which tells the source, too
        return [chain_hash(root, [index, source.length]) for index in range(self._count(source))]


def _bytes(source: Source) -> int:
    return len(source.features) if source.features is not None else 0
