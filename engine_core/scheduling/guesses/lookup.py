"""Guesses from the text itself: what followed when its last tokens stood in it before."""

from __future__ import annotations

from array import array

STRONGEST = 24
"""A match of so many tokens counts like any longer one."""
_TRIED = 32
"""The number of places that are compared, the latest first, at which the last tokens may have stood."""
_AT_ONCE = 4096
"""The most tokens that are entered at a time, so that a long text does not hold up the others of a step."""


class Lookup:
    """Finds for one sequence the earlier place whose text agrees with its end, and goes on from there.

    A place is a number of leading tokens. Places whose `least` last tokens have the same hash are chained, so
    a token costs one entry in each of two arrays. A place that was found is kept while the tokens that come
    are those that followed it: the match becomes stronger by each of them.
    """

    __slots__ = ("_earlier", "_heads", "_least", "_most", "_tokens", "at", "strength")

    def __init__(self, tokens: list[int], least: int, most: int) -> None:
        """`tokens` are those of the sequence, to which others are appended later."""
        self._tokens = tokens
        self._least, self._most = least, most
        self._heads = array("i", bytes(4 << max(10, (2 * len(tokens)).bit_length())))
        """hash -> the latest place with it; 0: none."""
        self._earlier = array("i", bytes(4 * least))
        """place -> the one before it with the same hash."""
        self.strength = 0
        """The tokens that agree, `STRONGEST` at most; 0: no place is found."""
        self.at = 0
        """The place whose next token is guessed."""

    @property
    def read(self) -> int:
        """The number of leading tokens that have been entered."""
        return len(self._earlier) - 1

    def enter(self) -> None:
        """Enter tokens that nobody has to be told about, and find a place for their end."""
        self._append(min(len(self._tokens), self.read + _AT_ONCE))
        self.strength = 0
        if self.read == len(self._tokens):
            self._find()

    def expect(self) -> int:
        """The token that is guessed next; -1: none."""
        return self._tokens[self.at] if self.strength else -1

    def follow(self) -> None:
        """Enter one more token, whose guess held if it is the expected one."""
        held = self._tokens[self.read] == self.expect()
        self._append(self.read + 1)
        if held:
            self.at += 1
            self.strength = min(self.strength + 1, STRONGEST)
        else:
            self._find()

    def draft(self, count: int) -> list[int]:
        """The next tokens as they followed the place; what reaches the end of the text goes on repeating."""
        found = self._tokens[self.at : self.at + count]
        period = len(self._tokens) - self.at
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _append(self, end: int) -> None:
        """Enter all places up to `end`."""
        tokens, heads, earlier, least = self._tokens, self._heads, self._earlier, self._least
        mask, first = len(heads) - 1, len(earlier)
        if end < first:
            return  # it is too short to have a place
        columns = [tokens[first - least + i : end - least + 1 + i] for i in range(least)]
        for place, last in enumerate(zip(*columns, strict=True), first):
            at = hash(last) & mask
            earlier.append(heads[at])
            heads[at] = place

    def _find(self) -> None:
        """Find the latest of the earlier places at which the most tokens agree with the end."""
        tokens, end, most = self._tokens, self.read, self._most
        found = strength = 0
        place = self._earlier[end]
        for _ in range(_TRIED):
            if not place:
                break
            if tokens[place - 1 - strength] == tokens[end - 1 - strength] and place > strength:
                agree = 0
                while agree < most and agree < place and tokens[place - 1 - agree] == tokens[end - 1 - agree]:
                    agree += 1
                if agree > strength:
                    found, strength = place, agree
                    if agree == most:
                        break
            place = self._earlier[place]
        self.at, self.strength = (found, strength) if strength >= self._least else (0, 0)
