"""The blocks of the cache by number: which are free, how many sequences share each, under which hashes they
are found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice


class BlockPool:
    """All blocks of the cache, by number: which are free, how many sequences share each, and what they hold.

    There are none if the model has no cache. It knows no sequences.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        # Blocks are taken from the front: those without a hash, then the least recently used published one.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._hashes: dict[int, list[bytes]] = {}
        """The hashes of each published block: of the whole, and of what beginnings leave of it."""
        self._by_hash: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1 - self.free / self.count if self.count else 0.0

    def users(self, block: int) -> int:
        return self._users[block]

    def find(self, hash: bytes) -> int | None:
        return self._by_hash.get(hash)

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more user of each block, which is then no longer free."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Takes `count` free blocks, those that follow block `after` where that evicts no published one."""
        taken: list[int] = []
        for _ in range(count):
            block = self._successor(after)
            if block is None:
                block = next(iter(self._free))
            del self._free[block]
            self._withdraw(block)
            self._users[block] = 1
            taken.append(block)
            after = block
        return taken

    def leaving(self, count: int) -> Iterator[bytes]:
        """The hashes of published blocks among the next `count` that would be taken, the first one first."""
        for block in islice(self._free, count):
            yield from self._hashes.get(block, ())

    def publish(self, block: int, hash: bytes) -> None:
        """Let later sequences find a block by its hash, unless another block has the same content."""
        if hash not in self._by_hash:
            self._by_hash[hash] = block
            self._hashes.setdefault(block, []).append(hash)

    def release(self, blocks: list[int]) -> None:
        """Give back one use of each block of a sequence; blocks without users become free, the last first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if block not in self._hashes:
                    self._free.move_to_end(block, last=False)

    def withdraw_all(self) -> None:
        """Forget all published blocks. Blocks in use stay in use, and later sequences do not find them."""
        for block in list(self._hashes):
            self._withdraw(block)

    def _successor(self, block: int | None) -> int | None:
        """The block behind this one, if it is free and not published."""
        if block is None or block + 1 not in self._free or block + 1 in self._hashes:
            return None
        return block + 1

    def _withdraw(self, block: int) -> None:
        """Let nobody find the block any more."""
        for hash in self._hashes.pop(block, ()):
            del self._by_hash[hash]
