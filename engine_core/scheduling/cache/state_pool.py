"""Places of remembered states, beside the pool of blocks, and the names by which they are found.

A state takes as much memory as a thousand tokens or more, so there are few places, and the least recently
used state gives way. A state is named by the hash of the block behind which it stands, which stands for all
tokens before. A place may be read in one step and written in the next, because steps run in their order; but
the rows of a step run at the same time, so a place that one of them reads is not given to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice


class StatePool:
    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()
        """Places of remembered states, the least recently used first."""
        self.published: dict[bytes, None] | None = None
        """Gets the name of each state that others can find, if somebody wants to know."""
        self._read: set[int] = set()
        """The places that the step that is planned now reads."""

    def __len__(self) -> int:
        """The number of states that are remembered."""
        return len(self._by_hash)

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_hash

    @property
    def free(self) -> int:
        """The places that hold nothing and await nothing."""
        return len(self._free)

    def begin_step(self) -> None:
        self._read.clear()

    def read(self, name: bytes) -> int:
        """Keep a remembered state for the step that is planned now, and return its place."""
        place = self._by_hash[name]
        self._by_hash.move_to_end(name)
        self._read.add(place)
        return place

    def leaving(self, count: int) -> Iterator[bytes]:
        """The names of remembered states among the next `count` places that would be taken."""
        return islice(self._by_hash, max(0, count - len(self._free)))

    def find(self, name: bytes) -> int | None:
        """The place of the state of this name, if it is remembered."""
        return self._by_hash.get(name)

    def take(self) -> int | None:
        """A place to write to; None if all are read in this step, or written by steps in flight."""
        if self._free:
            return self._free.pop()
        hash = next((hash for hash, place in self._by_hash.items() if place not in self._read), None)
        return None if hash is None else self._by_hash.pop(hash)

    def put(self, name: bytes, place: int, *, is_filled: bool) -> None:
        """Let others find the state in a place that `take` gave, or give the place back."""
        if is_filled and name not in self._by_hash:
            self._by_hash[name] = place
        else:
            self._free.append(place)

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def forget(self, name: bytes) -> None:
        """Forget the state of this name, if it is remembered."""
        if (place := self._by_hash.pop(name, None)) is not None:
            self._free.append(place)

    def forget_all(self) -> None:
        self._free += self._by_hash.values()
        self._by_hash.clear()
