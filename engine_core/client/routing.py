"""The rules by which a request is given to a replica. They use no socket and no clock.

A request goes to the replica that will have the fewest tokens to compute once it has this request too. Those
are the tokens that it has in flight already, plus those of this prompt that it does not hold from requests
before it. So a request follows its prefix, unless that replica is busier by more tokens than the prefix
saves; then it goes to another one, and from then on both hold the prefix. Equals take turns. A document of
late interaction follows the query to whose vectors it is compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from engine_core.protocol import Add
from worker.protocol import Pooling

BLOCK = 64
"""Tokens in each block of a prompt that is hashed: near the size of cache blocks, whichever that is."""
LONGEST = 256
"""Blocks of a prompt that are looked at: those beyond add work and change no choice."""
REMEMBERED = 1 << 16
"""The most blocks that are remembered, of all prompts together: some ten megabytes."""
MOST_QUERIES = 1 << 10
"""The most late-interaction queries that are remembered: more than the requests that are scored at a time."""
DECODE_TOKENS = 32
"""The load of a request that is being generated, in tokens. It needs one a step, but for many steps."""


class Router:
    """Remembers which replica has computed which prefixes, and chooses one for each request."""

    def __init__(self) -> None:
        self.remembered = REMEMBERED
        """The most blocks to remember for all replicas: their caches hold no more."""
        self._holders: OrderedDict[int, set[int]] = OrderedDict()
        """Hash of all tokens up to the end of a block -> the replicas that have computed them."""
        self._turns = count(1)
        self._last_turn: dict[int, int] = {}

    def choose(
        self, tokens: list[int], loads: Mapping[int, int], *, salt: str = "", remember: bool = True
    ) -> tuple[int, int]:
        """Choose a replica; returns it, and how many tokens this request adds to its load.

        `loads` holds the replicas that can be chosen, with the tokens that each has in flight. Without
        `remember` no cache keeps the prompt.
        """
        blocks = list(_hashes(tokens, salt)) if remember and len(loads) > 1 else []
        held = self._held(blocks, loads)
        chosen = min(loads, key=lambda one: (loads[one] - BLOCK * held[one], self._last_turn.get(one, 0)))
        self._last_turn[chosen] = next(self._turns)
        self._remember(blocks, chosen)
        return chosen, len(tokens) - BLOCK * held[chosen]

    def forget(self, replicas: Iterable[int]) -> None:
        """Forget all that these replicas held, because their caches are empty."""
        gone = set(replicas)
        for block, holders in list(self._holders.items()):
            holders -= gone
            if not holders:
                del self._holders[block]

    def _held(self, blocks: list[int], replicas: Iterable[int]) -> dict[int, int]:
        """Replica -> how many leading blocks of a prompt it holds."""
        held = dict.fromkeys(replicas, 0)
        for index, block in enumerate(blocks):
            holders = self._holders.get(block)
            if holders is None:
                break
            for one in holders:
                if held.get(one) == index:  # all blocks before this one, too
                    held[one] = index + 1
        return held

    def _remember(self, blocks: list[int], replica: int) -> None:
        # The last block first, so that what several prompts share is forgotten last.
        for block in reversed(blocks):
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self.remembered:
            self._holders.popitem(last=False)


def _hashes(tokens: list[int], salt: str) -> Iterator[int]:
    """The hash of each whole block together with all before it."""
    chain = hash(salt)
    for end in range(BLOCK, min(len(tokens), BLOCK * LONGEST) + 1, BLOCK):
        chain = hash((chain, tuple(tokens[end - BLOCK : end])))
        yield chain


class LateQueries:
    """The late-interaction queries that were sent last, and which replica keeps the vectors of each."""

    def __init__(self) -> None:
        self._queries: OrderedDict[str, tuple[Add, int | None]] = OrderedDict()
        """Name -> the query and the replica that keeps its vectors."""

    def note(self, add: Add, replica: int) -> None:
        """Note that this replica gets a request; only queries are remembered."""
        if isinstance(add.params, Pooling) and (name := add.params.late_query):
            self._queries[name] = add, replica
            self._queries.move_to_end(name)
            if len(self._queries) > MOST_QUERIES:
                self._queries.popitem(last=False)

    def holder(self, add: Add) -> int | None:
        """The replica that keeps the vectors for which a document asks."""
        return self._queries.get(_asked(add), (None, None))[1]

    def missing(self, add: Add, replica: int) -> Add | None:
        """The query that this replica must get before a document, if it has not got it. Call this once."""
        query, holder = self._queries.get(_asked(add), (None, None))
        if query is None or holder == replica:
            return None
        self.note(query, replica)
        return query

    def lose(self, replica: int) -> None:
        """Forget what a replica kept, which has ended."""
        for name, (add, holder) in self._queries.items():
            if holder == replica:
                self._queries[name] = add, None


def _asked(add: Add) -> str:
    return add.params.late_document if isinstance(add.params, Pooling) else ""
