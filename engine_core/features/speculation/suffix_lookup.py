"""Answers that have ended, in which others find what followed when their last tokens stood there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from mmap import mmap

from engine_core.scheduling.sequence import root_hash

_BYTES = 28
"""The memory that a token takes in all tables together."""
_TRIED = 32
_LEAST_PLACES = 1024


class EndedAnswers:
    """Remembers the latest answers within a bound of memory. Those of a salt are found by that salt only.

    Tokens lie in a ring, and a place is the number of all tokens that were ever written before it. Places
    whose salt and last `least` tokens have the same hash are chained. What the ring has overwritten is known
    by its place, so nothing has to be taken out. Memory is taken as it is written.
    """

    def __init__(self, size: int, least: int, most: int, answers: int) -> None:
        """`size` is the memory in bytes, and so many `answers` are remembered at most."""
        self._least, self._most = least, most
        self._places = places = max(_LEAST_PLACES, 1 << max(0, (size // _BYTES).bit_length() - 1))
        self._tokens = memoryview(mmap(-1, 4 * places)).cast("i")
        """The tokens, and -1 behind each answer."""
        self._salts = memoryview(mmap(-1, 8 * places)).cast("q")
        self._heads = memoryview(mmap(-1, 8 * places)).cast("q")
        """hash -> the latest place with it; 0: none."""
        self._earlier = memoryview(mmap(-1, 8 * places)).cast("q")
        """place -> the one before it with the same hash."""
        self._tokens[0] = -1
        self._starts: deque[int] = deque(maxlen=answers)
        self._end = 1
        self._oldest = 0
        """What begins up to this place is remembered no more."""

    def add(self, tokens: Ordered[int], salt: int) -> None:
        """Remember an answer, with some tokens of its prompt before it."""
        mask, least, start = self._places - 1, self._least, self._end
        tokens = tokens[-(self._places // 4) :]
        for place, token in enumerate([*tokens, -1], start):
            self._tokens[place & mask] = token
            self._salts[place & mask] = salt
        for at in range(least, len(tokens)):
            head, place = hash((salt, *tokens[at - least : at])) & mask, start + at
            self._earlier[place & mask] = self._heads[head]
            self._heads[head] = place
        self._starts.append(start)
        self._end = start + len(tokens) + 1
        self._oldest = max(self._end - self._places, self._starts[0])

    def may_find(self, tokens: list[int], salt: int) -> bool:
        """Whether it is worth a search for an end in common with `tokens`."""
        end = hash((salt, *tokens[-self._least :]))
        return self._heads[end & (self._places - 1)] > self._oldest

    def find(self, tokens: list[int], salt: int) -> tuple[int, int]:
        """The place with the longest end in common with `tokens`, and its length; 0, 0 if there is none.

        Of several it is the latest among those behind which the most frequent token comes.
        """
        mask, most, count = self._places - 1, self._most, len(tokens)
        place = self._heads[hash((salt, *tokens[count - self._least :])) & mask]
        longest, places = self._least, list[int]()
        for _ in range(_TRIED):
            if place <= self._oldest:
                break
            agree = 0
            if self._salts[place & mask] == salt:
                while agree < min(most, count) and self._tokens[(place - 1 - agree) & mask] == tokens[~agree]:
                    agree += 1
            if agree > longest:
                longest, places = agree, [place]
            elif agree == longest:
                places.append(place)
            place = self._earlier[place & mask]
        if not places:
            return 0, 0
        following = [self._tokens[each & mask] for each in places]
        return places[following.index(max(following, key=following.count))], longest

    def following(self, place: int, count: int) -> list[int]:
        """The tokens behind a place, up to the end of its answer."""
        if place <= self._oldest:
            return []
        mask = self._places - 1
        found = [self._tokens[at & mask] for at in range(place, place + count)]
        return found[: found.index(-1)] if -1 in found else found


def number_of(salt: str, adapter: str = "") -> int:
    """A number that stands for a salt and an adapter. It is as hard to meet by chance as their blocks."""
    return int.from_bytes(root_hash(f"{salt}\0{adapter}")[:8], "little", signed=True)
