"""The sources of live sequences, and the blocks in which the worker holds their keys and values.

Equal sources, by hash and salt, are encoded once: their blocks are found as long as nobody needs the room,
all of them or none. A sequence holds those of its source from admission to its end or preemption; what the
encoder reads stays until it ends, so that it can be encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.protocol import Add, Source
from engine_core.scheduling.cache.block_hash import chain_hash, own_salt, root_hash
from engine_core.scheduling.cache.block_pool import BlockPool
from worker.protocol import EncodeSource
from worker.worker_facts import WorkerFacts

_MOST_BYTES = 1 << 30
"""The bytes that features of live requests may take, unless a single one has more."""


@dataclass(slots=True)
class _Held:
    source: Source
    users: int = 0


class SourceBlocks:
    """Decides which sources a step encodes, and into which blocks."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts) -> None:
        self.pool = BlockPool(facts.num_source_blocks)
        self.encoded = self.reused = 0
        """How many sources were encoded, and how often a sequence has found one that was, in total."""
        self.bytes = 0
        """The bytes of the features of all live requests."""
        self._caches = config.enable_prefix_caching
        self._size = facts.block_size
        self._per_step = config.max_num_encoder_input_tokens or facts.max_num_batched_tokens
        self.encoding: list[EncodeSource] = []
        """What the step that is being planned encodes."""
        self._left = self._per_step
        """The positions that the step that is being planned can still encode."""
        self._live: dict[str, _Held] = {}

    # Requests come and go.

    def lacks_room(self, add: Add) -> bool:
        """Whether the features of live requests would take too many bytes with those of this one."""
        source = add.source
        if source is None or source.hash in self._live or not self.bytes:
            return False
        return self.bytes + _bytes(source) > _MOST_BYTES

    def enter(self, add: Add) -> Add:
        """Take in a request, which is returned with a salt by which it shares nothing with other sources."""
        if (source := add.source) is None:
            return add
        held = self._live.get(source.hash)
        if held is None:
            held = self._live[source.hash] = _Held(source)
            self.bytes += _bytes(source)
        held.users += 1
        salt = own_salt(add.salt, [], [(source.hash.encode(), source.length)])
        return replace(add, source=replace(source, features=held.source.features), salt=salt)

    def leave(self, add: Add) -> None:
        """Note that a request has ended: features that no other one needs are dropped."""
        if (source := add.source) is None:
            return
        held = self._live[source.hash]
        held.users -= 1
        if not held.users:
            self.bytes -= _bytes(source)
            del self._live[source.hash]

    # A step is planned.

    def begin_step(self) -> None:
        self.encoding, self._left = [], self._per_step

    def fits(self, add: Add) -> bool:
        """Whether the blocks of a request's source are there, or there is room for them."""
        source = add.source
        return source is None or self._find(add, source) is not None or self._count(source) <= self.pool.free

    def may_begin(self, add: Add) -> bool:
        """Whether the step has room to encode a request's source; the first one of a step need not fit."""
        if (source := add.source) is None or self._find(add, source) is not None:
            return True
        return not self.encoding or source.length <= self._left

    def admit(self, add: Add) -> tuple[list[int], int]:
        """The blocks of a request's source, and how many of its positions the step has to encode for it."""
        if (source := add.source) is None:
            return [], 0
        if (found := self._find(add, source)) is not None:
            self.pool.share(found)
            self.reused += 1
            return found, 0
        blocks = self.pool.take(self._count(source))
        for block, name in zip(blocks, self._names(add, source), strict=True):
            self.pool.publish(block, name)
        self.encoding.append(EncodeSource(source.tokens, source.features, source.length, blocks))
        self._left -= source.length
        self.encoded += 1
        return blocks, source.length

    def lose(self) -> None:
        """Note that a step has failed, which may have been to encode what is published."""
        self.pool.withdraw_all()

    def _count(self, source: Source) -> int:
        return -(-source.length // self._size)

    def _find(self, add: Add, source: Source) -> list[int] | None:
        if not self._caches:
            return None
        blocks = [self.pool.find(name) for name in self._names(add, source)]
        return [block for block in blocks if block is not None] if None not in blocks else None

    def _names(self, add: Add, source: Source) -> list[bytes]:
        root = root_hash(add.salt)  # which tells the source, too
        return [chain_hash(root, [index, source.length]) for index in range(self._count(source))]


def _bytes(source: Source) -> int:
    return len(source.features) if source.features is not None else 0
