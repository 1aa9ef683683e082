"""Which replica a request goes to. Pure: knows tokens and numbers of replicas, no socket and no clock.

The rule: the replica that will have the fewest tokens to compute once it has this request too. Those are the
tokens that it has in flight already, plus those of this prompt that it does not hold from requests before it.
So a request follows its prefix, unless that replica is busier by more tokens than the prefix saves; then it
goes where there is room, and the prefix is at home in both places. Equals take turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

BLOCK = 64
"""Tokens by which prefixes are told apart: near the size of cache blocks, whichever that is."""
LONGEST = 256
"""Blocks of a prompt that are looked at: those beyond add work and change no choice."""
REMEMBERED = 1 << 16
"""Blocks of all prompts together, at most: some ten megabytes."""
QUERIES = 1 << 12
GENERATING = 32
"""What a request that is being generated weighs, in tokens. It needs one a step, but for many steps."""


class Router:
    def __init__(self) -> None:
        self.remembered = REMEMBERED
        """Blocks of all replicas together. Beyond what their caches hold it would be wrong."""
        self._homes: OrderedDict[int, set[int]] = OrderedDict()
        """Hash of all tokens up to the end of a block -> the replicas that have computed them."""
        self._queries: OrderedDict[str, int] = OrderedDict()
        self._turns = count(1)
        self._last_turn: dict[int, int] = {}

    def choose(
        self, tokens: list[int], loads: Mapping[int, int], *, salt: str = "", remember: bool = True
    ) -> tuple[int, int]:
        """One of the replicas in `loads`, which says how many tokens each has in flight; and how many more
        it has now.

        Without `remember` the prompt leaves nothing behind that could be used again.
        """
        blocks = list(_hashes(tokens, salt)) if remember and len(loads) > 1 else []
        held = self._held(blocks, loads)
        chosen = min(loads, key=lambda one: (loads[one] - BLOCK * held[one], self._last_turn.get(one, 0)))
        self._last_turn[chosen] = next(self._turns)
        self._remember(blocks, chosen)
        return chosen, len(tokens) - BLOCK * held[chosen]

    def keep_query(self, name: str, replica: int) -> None:
        """Vectors that later requests refer to by this name are kept there."""
        self._queries[name] = replica
        self._queries.move_to_end(name)
        if len(self._queries) > QUERIES:
            self._queries.popitem(last=False)

    def home_of_query(self, name: str) -> int | None:
        return self._queries.get(name)

    def forget(self, replicas: Iterable[int]) -> None:
        """Their caches are empty."""
        gone = set(replicas)
        for block, homes in list(self._homes.items()):
            homes -= gone
            if not homes:
                del self._homes[block]
        self._queries = OrderedDict((name, one) for name, one in self._queries.items() if one not in gone)

    def _held(self, blocks: list[int], replicas: Iterable[int]) -> dict[int, int]:
        """How many leading blocks each replica has."""
        held = dict.fromkeys(replicas, 0)
        for index, block in enumerate(blocks):
            homes = self._homes.get(block)
            if homes is None:
                break
            for one in homes:
                if held.get(one) == index:  # all blocks before this one, too
                    held[one] = index + 1
        return held

    def _remember(self, blocks: list[int], replica: int) -> None:
        # The last block first, so that what several prompts share is forgotten last.
        for block in reversed(blocks):
            self._homes.setdefault(block, set()).add(replica)
            self._homes.move_to_end(block)
        while len(self._homes) > self.remembered:
            self._homes.popitem(last=False)


def _hashes(tokens: list[int], salt: str) -> Iterator[int]:
    """Of each whole block together with all before it."""
    chain = hash(salt)
    for end in range(BLOCK, min(len(tokens), BLOCK * LONGEST) + 1, BLOCK):
        chain = hash((chain, tuple(tokens[end - BLOCK : end])))
        yield chain
