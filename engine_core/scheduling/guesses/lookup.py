"""Guesses from text: what followed when the last tokens stood before in it, or in an earlier answer."""

from __future__ import annotations

from array import array

from engine_core.scheduling.guesses.suffix import Answers

STRONGEST = 24
"""A match of so many tokens counts like any longer one."""
_TRIED = 32
"""The number of places that are compared, the latest first, at which the last tokens may have stood."""
_AT_ONCE = 4096
"""The most tokens that are entered at a time, so that a long text does not hold up the others of a step."""


class Lookup:
    """Finds for one sequence the place in an earlier text that agrees with its end, and goes on from there.

    A place is a number of leading tokens. Places whose `least` last tokens have the same hash are chained, so
    a token costs one entry in each of two arrays. A place that was found is kept while the tokens that come
    are those that followed it: the match becomes stronger by each of them.
    """

    __slots__ = (
        *("_answers", "_at", "_earlier", "_heads", "_in_answer", "_least", "_most", "_salt", "_tokens"),
        *("expected", "strength"),
    )

    def __init__(
        self, tokens: list[int], least: int, most: int, answers: Answers | None = None, salt: int = 0
    ) -> None:
        """`tokens` are those of the sequence, to which others are appended later.

        If there are `answers`, a place is sought among those of this salt, too.
        """
        self._tokens = tokens
        self._answers, self._salt, self._in_answer = answers, salt, False
        self._least, self._most = least, most
        self._heads = array("i", bytes(4 << max(10, (2 * len(tokens)).bit_length())))
        """hash -> the latest place with it; 0: none."""
        self._earlier = array("i", bytes(4 * least))
        """place -> the one before it with the same hash."""
        self._at = 0
        """The place whose next token is guessed."""
        self.strength = 0
        """The tokens that agree, `STRONGEST` at most; 0: no place is found."""
        self.expected = -1
        """The token that is guessed next; -1: none."""

    @property
    def read(self) -> int:
        """The number of leading tokens that have been entered."""
        return len(self._earlier) - 1

    def enter(self) -> None:
        """Enter tokens that nobody has to be told about, and find a place for their end."""
        self._append(min(len(self._tokens), self.read + _AT_ONCE))
        self.strength, self.expected = 0, -1
        if self.read == len(self._tokens):
            self._find()

    def follow(self) -> None:
        """Enter one more token, whose guess held if it is the expected one."""
        tokens, end = self._tokens, len(self._earlier)
        at = hash(tuple(tokens[end - self._least : end])) & (len(self._heads) - 1)
        self._earlier.append(self._heads[at])
        self._heads[at] = end
        if tokens[end - 1] == self.expected:
            self._at += 1
            if self.strength < STRONGEST:
                self.strength += 1
            self._expect()
        else:
            self.expected = -1
        if self.expected < 0:
            self._find()

    def draft(self, count: int) -> list[int]:
        """The next tokens as they followed the place; what reaches the end of the text goes on repeating."""
        if self.expected < 0:
            return []
        if self._in_answer and self._answers is not None:
            return self._answers.following(self._at, count)
        found = self._tokens[self._at : self._at + count]
        period = len(self._tokens) - self._at
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _expect(self) -> None:
        if self._in_answer and self._answers is not None:
            self.expected = next(iter(self._answers.following(self._at, 1)), -1)
        else:
            self.expected = self._tokens[self._at]

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
        self._at, self.strength = (found, strength) if strength >= self._least else (0, 0)
        self._in_answer = False
        if self._answers is not None and self.strength < most and end == len(tokens) >= self._least:
            found, strength = self._answers.find(tokens, self._salt)
            if strength > self.strength:
                self._at, self.strength, self._in_answer = found, strength, True
        if self.strength:
            self._expect()
