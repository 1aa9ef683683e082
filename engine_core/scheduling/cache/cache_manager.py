"""Slots and cache blocks: which sequences fit, and which of both each one holds.

A sequence that runs has a slot, which is its row in the worker's tables, and blocks for the positions that
are computed. Layers that read alike are a group, and a sequence has a table of blocks for each group. A group
with a window gives back the blocks that no query can reach any more.

A full block whose tokens are certain is published under the hash of its tokens and of all before them, so
that a later sequence with the same prefix can share it. A published block that nobody uses can still be found
until it is taken for something else: the least recently used one goes first, and of one sequence the last
block before the first. A cached prefix ends where groups without a window have all blocks, those with one
have the blocks that the next query reads, and what else a feature keeps of it is there (`may_end`).

A request may name beginnings of its prompt that later ones have, too (`AddRequest.shared`). What such a
beginning leaves of its last block is published as well, and copied into a block of its own for each sequence
that goes on behind it.

Which sequence runs, and which one is preempted for another, is decided by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import chain
from typing import NamedTuple

from engine_core.scheduling.cache.block_pool import BlockPool
from engine_core.scheduling.feature import Hooks
from engine_core.scheduling.sequence import Place, Sequence
from worker.worker_facts import WorkerFacts, blocks_held

Tables = list[list[int]]
"""The blocks of each group of layers, all as many. The scratch block is where there is none."""


class Prefix(NamedTuple):
    """The part of a prompt that is found in the cache."""

    tables: Tables
    length: int
    """Its tokens."""
    end: list[int]
    """The block, for each group, whose first rows are its last ones; none if it ends with a full block."""


Find = Callable[[bytes], int | None]
"""The type of a function that finds the block of a name."""

MayEnd = Callable[[bytes], bool]
"""The type of a function that says whether a prefix can end behind the block with this hash."""

_ELSEWHERE = -1
"""The number of a block that is not in the pool, but can be brought there."""


def blocks_needed(tokens: int, facts: WorkerFacts, computed: int = 0) -> int:
    """The most blocks that so many tokens, of which some are computed, fill at a time; 0 without a cache."""
    if not facts.causal:
        return 0
    step = min(tokens - computed, facts.max_num_batched_tokens)
    return blocks_held(tokens, step, facts.block_size, facts.windows)


class CacheManager:
    """Gives slots and cache blocks to sequences, and finds the cached prefixes of prompts."""

    def __init__(self, facts: WorkerFacts, hooks: Hooks, *, caches: bool) -> None:
        """`caches`: full blocks are published, so that later sequences with the same prefix share them."""
        self._hooks = hooks
        self.pool = BlockPool(facts.num_blocks)
        self.may_end: MayEnd | None = None
        """Says behind which blocks a cached prefix can end, if not behind all."""
        self.free_slots = list(reversed(range(facts.max_num_seqs)))
        self._facts = facts
        self._caches = caches
        self._shares_ends = caches and not facts.drafts  # drafters keep what they read of whole blocks
        self._scratch = facts.num_blocks
        self._windows = [(group, window) for group, window in enumerate(facts.windows) if window]
        self._names = [bytes([group]) if group else b"" for group in range(len(facts.windows))]
        """What follows the hash of a block in its name, for each group."""
        self.published: dict[bytes, None] | None = None
        """Gets the name of each block that is published, if somebody wants to know."""

    def match(self, seq: Sequence) -> Prefix | None:
        """The cached prefix with which a waiting sequence could start now, or None if it does not fit.

        All its known tokens must fit, not only the first chunk: otherwise it would be admitted into a full
        cache again and again, only to be preempted.
        """
        if not self.free_slots:
            return None
        for fits in self._hooks.fits:
            if not fits(seq):
                return None
        prefix = self._find(seq)
        kept = self._held(prefix.tables)
        unused = sum(not self.pool.users(block) for block in kept)
        new = blocks_needed(len(seq.tokens), self._facts, prefix.length) - len(kept)
        return prefix if new + unused <= self.pool.free else None

    def fits(self, seq: Sequence) -> bool:
        return self.match(seq) is not None

    def cached_tokens(self, seq: Sequence) -> int:
        """The number of tokens that a waiting sequence would find in the cache now."""
        return self._find(seq).length

    def known_tokens(self, seq: Sequence) -> int:
        """The number of tokens whose blocks are known, also where no cached prefix can end."""
        return self._known_blocks(seq, self.pool.find)[0] * self._facts.block_size

    def admit(self, seq: Sequence, prefix: Prefix) -> int:
        """Give a sequence a slot and the cached blocks that `match` found for it; returns the slot.

        Behind them it gets a block to which the end of the prefix is to be copied, if that is part of one.
        """
        self.pool.share(self._held(prefix.tables))
        seq.tables, seq.computed = prefix.tables, prefix.length
        seq.published = len(prefix.tables[0])
        seq.slot, seq.place = self.free_slots.pop(), Place.RUNNING
        if prefix.end:
            self._take(seq, 1)  # even if it is the end itself
            self.pool.share(prefix.end)
            self.pool.release(prefix.end)  # as the latest that was used
        return seq.slot

    def grow(self, seq: Sequence, positions: int) -> list[int] | None:
        """Give a sequence blocks for so many positions, which are returned; None if too few are free."""
        if self._windows:
            self._give_back(seq, seq.published if self._caches else positions)
        need = -(-positions // self._facts.block_size) - len(seq.tables[0])
        if need <= 0 or not self._facts.causal:
            return []
        if need * len(seq.tables) > self.pool.free:
            self._give_back(seq, positions)
            if need * len(seq.tables) > self.pool.free:
                return None
        return self._take(seq, need)

    def grow_if_spare(self, seq: Sequence, count: int, spared: int) -> int:
        """Give a sequence blocks for `count` more tokens than are computed -> how many of them have room.

        It gets new ones only if so many are left in each group afterwards. No block is given back here, as
        other rows of the same step may read it.
        """
        size = self._facts.block_size
        need = -(-(seq.computed + count) // size) - len(seq.tables[0])
        if need > 0 and (need + spared) * len(seq.tables) <= self.pool.free:
            self._take(seq, need)
        return min(count, len(seq.tables[0]) * size - seq.computed)

    def _take(self, seq: Sequence, count: int) -> list[int]:
        """Take so many blocks for each group of layers."""
        gained: list[int] = []
        for table in seq.tables:
            new = self.pool.take(count, after=table[-1] if table else None)
            table += new
            gained += new
        return gained

    def _give_back(self, seq: Sequence, most: int) -> None:
        """Give back blocks, of the first `most` of each table, that no query of a later step can reach.

        Steps in flight may still read them: they come before any that writes there. Blocks that are not
        published yet are kept, unless memory is short, because nobody could find them otherwise.
        """
        for group, window in self._windows:
            table, stop = seq.tables[group], min(most, (seq.computed - window + 1) // self._facts.block_size)
            first = stop
            while first > 0 and table[first - 1] != self._scratch:
                first -= 1
            if first < stop:
                self.pool.release(table[first:stop])
                table[first:stop] = [self._scratch] * (stop - first)

    def publish(self, seq: Sequence, positions: int) -> None:
        """Let others share the full blocks of the first positions, which landed steps have computed."""
        size = self._facts.block_size
        while self._caches and seq.published < positions // size:
            hash = seq.block_hash(seq.published, size)
            for table, name in zip(seq.tables, self._names, strict=True):
                if (block := table[seq.published]) != self._scratch:
                    self.pool.publish(block, hash + name)
                    if self.published is not None:
                        self.published[hash + name] = None
            seq.published += 1
        if seq.request.shared and self._shares_ends:
            self._publish_ends(seq, positions)

    def _publish_ends(self, seq: Sequence, positions: int) -> None:
        """Let others share what the beginnings within the first positions leave of their last blocks."""
        for length in seq.request.shared:
            index, part = divmod(length, self._facts.block_size)
            if not part or length > positions:
                continue
            hash = seq.end_hash(length, self._facts.block_size)
            for table, name in zip(seq.tables, self._names, strict=True):
                if table[index] != self._scratch:
                    self.pool.publish(table[index], hash + name)

    def release(self, seq: Sequence) -> None:
        self.free_slots.append(seq.slot)
        self.pool.release(self._held(seq.tables))
        for release in self._hooks.release:
            release(seq)
        seq.place, seq.tables, seq.published = Place.WAITING, [], 0

    def _held(self, tables: Tables) -> list[int]:
        """The blocks of a sequence in the order of their positions."""
        blocks = [*chain(*zip(*tables, strict=True))]
        return [block for block in blocks if block != self._scratch] if self._windows else blocks

    def reset_prefixes(self, running: Iterable[Sequence] = ()) -> None:
        """Forget all cached prefixes, and what these sequences compute behind them."""
        self.pool.withdraw_all()
        for seq in running:
            seq.seclude()

    @property
    def block_size(self) -> int:
        return self._facts.block_size

    def prefix_with(
        self, seq: Sequence, others: Container[bytes], may_end: MayEnd | None
    ) -> tuple[int, list[tuple[bytes, int | None]]]:
        """The longest prefix of a waiting sequence if blocks of the names in `others` were in the pool, too.

        Returns its length in blocks, and in order the name of each block that is read, with its number (None:
        it is one of the others).
        """

        def find(name: bytes) -> int | None:
            block = self.pool.find(name)
            return _ELSEWHERE if block is None and name in others else block

        tables = self._cached_prefix(seq, find, may_end)
        count = len(tables[0])
        return count, [
            (name, None if block == _ELSEWHERE else block)
            for index in range(count)
            for name, block in self._column(seq, tables, index)
        ]

    def _column(self, seq: Sequence, tables: Tables, index: int) -> list[tuple[bytes, int]]:
        """The names and numbers of the blocks of this index, of all groups that have one."""
        hash = seq.block_hash(index, self._facts.block_size)
        columns = zip(tables, self._names, strict=True)
        return [(hash + name, table[index]) for table, name in columns if table[index] != self._scratch]

    def _find(self, seq: Sequence) -> Prefix:
        """The longest cached prefix of a waiting sequence."""
        size = self._facts.block_size
        tables = self._cached_prefix(seq, self.pool.find, self.may_end)
        length = len(tables[0]) * size
        may_end = self._shares_ends and self.may_end is None and self._may_share(seq)
        for shared in reversed(seq.request.shared if may_end else ()):
            if length < shared < min(length + size, len(seq.tokens)):
                hash = seq.end_hash(shared, size)
                found = (self.pool.find(hash + name) for name in self._names)
                end = [block for block in found if block is not None]
                if len(end) == len(tables):
                    return Prefix(tables, shared, end)
        return Prefix(tables, length, [])

    def _cached_prefix(self, seq: Sequence, find: Find, may_end: MayEnd | None) -> Tables:
        """The cached blocks with which a sequence can begin. At least one token is left to compute."""
        count, tables = self._known_blocks(seq, find)
        if self._windows or may_end:
            count = self._shorten(seq, count, find, may_end)
            tables = [table[:count] for table in tables]
        for group, window in self._windows:
            first = self._first_read(count, window)
            found = (find(self._name(seq, index, group)) for index in range(first, count))
            tables.append([self._scratch] * first + [block for block in found if block is not None])
        return tables

    def _known_blocks(self, seq: Sequence, find: Find) -> tuple[int, Tables]:
        """The number of first blocks that all groups without windows have, and the tables of these groups."""
        tables: Tables = []
        size, count = self._facts.block_size, 0
        if self._may_share(seq):
            count = (len(seq.tokens) - 1) // size
        for group in range(len(self._names) - len(self._windows)):
            table: list[int] = []
            for index in range(count):
                block = find(seq.block_hash(index, size) + self._names[group])
                if block is None:
                    break
                table.append(block)
            count = len(table)
            tables.append(table)
        return count, tables

    def _may_share(self, seq: Sequence) -> bool:
        return self._caches and not (seq.owes_prompt_logprobs or seq.aligns)

    def _shorten(self, seq: Sequence, count: int, find: Find, may_end: MayEnd | None) -> int:
        """As many of the first blocks as groups with windows allow, too, and with which a prefix can end."""
        before = -1
        while count != before:
            before = count
            for group, window in self._windows:
                count = self._end_of_window(seq, group, window, count, find)
            while may_end and count and not may_end(seq.block_hash(count - 1, self._facts.block_size)):
                count -= 1
        return count

    def _end_of_window(self, seq: Sequence, group: int, window: int, count: int, find: Find) -> int:
        """The last block, up to `count`, behind which a query finds all blocks of a group that it reads."""
        index = count
        while index > self._first_read(count, window):
            index -= 1
            if find(self._name(seq, index, group)) is None:
                count = index
        return count

    def _first_read(self, count: int, window: int) -> int:
        """The index of the first block that the query behind so many blocks reads through a window."""
        size = self._facts.block_size
        return max(0, count * size - window + 1) // size

    def _name(self, seq: Sequence, index: int, group: int) -> bytes:
        return seq.block_hash(index, self._facts.block_size) + self._names[group]
