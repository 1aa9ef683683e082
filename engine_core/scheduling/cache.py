"""Where sequences live while they run: their rows in the worker and their cache blocks.

Knows who fits and who holds what; who runs, and who has to leave for whom, is the scheduler's to decide.
"""

from __future__ import annotations

from engine_core.scheduling.blocks import BlockPool
from engine_core.scheduling.request_checks import blocks_needed
from engine_core.scheduling.sequence import Sequence
from worker.protocol import WorkerFacts


class Room:
    def __init__(self, facts: WorkerFacts, *, caches: bool) -> None:
        """`caches`: full blocks are kept for later sequences that begin alike."""
        self.pool = BlockPool(facts.num_blocks)
        self.free_slots = list(reversed(range(facts.max_num_seqs)))
        self._facts = facts
        self._caches = caches

    def look(self, seq: Sequence) -> list[int] | None:
        """The cached blocks with which a waiting sequence could start now, or None if it cannot.

        There must be room for all it knows, not for its first chunk only: else it would be admitted into a
        full cache again and again, only to be preempted.
        """
        if not self.free_slots:
            return None
        shared = self._cached(seq)
        unused = sum(not self.pool.users(block) for block in shared)
        new = blocks_needed(len(seq.tokens), self._facts) - len(shared)
        return shared if new + unused <= self.pool.free else None

    def enter(self, seq: Sequence, shared: list[int]) -> int:
        """Give it a row, and the cached blocks it was found to start with -> the row."""
        self.pool.share(shared)
        seq.blocks = shared
        seq.published = len(shared)
        seq.computed = len(shared) * self._facts.block_size
        seq.slot = self.free_slots.pop()
        return seq.slot

    def grow(self, seq: Sequence, positions: int) -> bool:
        """Give it blocks for so many positions, if there are enough."""
        need = blocks_needed(positions, self._facts) - len(seq.blocks)
        if need > self.pool.free:
            return False
        if need > 0:
            seq.blocks += self.pool.take(need, after=seq.blocks[-1] if seq.blocks else None)
        return True

    def publish(self, seq: Sequence, landed: int) -> None:
        """Its first `landed` positions are certain: others may share the blocks that these fill."""
        size = self._facts.block_size
        while self._caches and seq.published < landed // size:
            index = seq.published
            self.pool.publish(seq.blocks[index], seq.block_hash(index, size))
            seq.published += 1

    def leave(self, seq: Sequence) -> None:
        """Take its row and its blocks back."""
        if seq.slot is None:
            raise RuntimeError(f"sequence {seq.key} has no row to leave")
        self.free_slots.append(seq.slot)
        self.pool.release(seq.blocks)
        seq.slot, seq.blocks, seq.published = None, [], 0

    def _cached(self, seq: Sequence) -> list[int]:
        """The blocks of its beginning that are in the cache. One token at least is left to compute."""
        blocks: list[int] = []
        if not self._caches or seq.tells_prompt:
            return blocks
        size = self._facts.block_size
        for index in range((len(seq.tokens) - 1) // size):
            block = self.pool.find(seq.block_hash(index, size))
            if block is None:
                break
            blocks.append(block)
        return blocks
