"""The cache blocks: which are free, who shares which, and what lies in them. Knows no sequence.

A full block whose tokens are certain is published under a hash of these tokens and of all before them, so
that a later sequence with the same beginning can share it. A published block that nobody uses stays
findable until it is taken for something else: the one unused for longest goes first, and of one sequence
its end before its beginning.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

_HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """What the chain of hashes begins with: sequences of different salts share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()


def chain_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Names a block by its tokens and, through `parent`, by all tokens before them.

    A cryptographic hash: with a weaker one, a prompt could be made to find somebody else's block.
    """
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=_HASH_BYTES).digest()


class BlockPool:
    """Without any blocks if the model keeps no cache: then nobody needs one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        # Taken from the front: first what has no hash, then the published one that is unused for longest.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._hashes: list[bytes | None] = [None] * count
        self._by_hash: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1 - len(self._free) / self.count if self.count else 0.0

    def users(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._users[block]

    def find(self, hash: bytes) -> int | None:
        return self._by_hash.get(hash)

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` free blocks, continuing `after` without a gap where that costs no published block."""
        taken: list[int] = []
        for _ in range(count):
            block = self._successor(after)
            if block is None:
                block = next(iter(self._free))
            del self._free[block]
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
            after = block
        return taken

    def publish(self, block: int, hash: bytes) -> None:
        """If another block has the same content already, this one stays private."""
        if hash not in self._by_hash and self._hashes[block] is None:
            self._by_hash[hash] = block
            self._hashes[block] = hash

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Nothing cached is found any more. Blocks in use stay as they are, without a name."""
        for block in list(self._by_hash.values()):
            self._forget(block)

    def _successor(self, block: int | None) -> int | None:
        if block is None or block + 1 not in self._free or self._hashes[block + 1] is not None:
            return None
        return block + 1

    def _forget(self, block: int) -> None:
        hash = self._hashes[block]
        if hash is not None:
            del self._by_hash[hash]
            self._hashes[block] = None
