"""Guesses from text: what followed when the last tokens stood before in it, or in an earlier answer."""

from __future__ import annotations

from array import array

from engine_core.features.speculation.suffix_lookup import EndedAnswers

STRONGEST = 24
"""A match of so many tokens counts like any longer one."""
_TRIED = 32
"""The number of places that are compared, the latest first, at which the last tokens may have stood."""
_MORE = 4096
"""The most tokens to come for which the table of places has room from the start."""
_AT_ONCE = 4096
"""The most tokens that are entered at a time, so that a long text does not hold up the others of a step."""


class Lookup:
    """Finds for one sequence the place in an earlier text that agrees with its end, and goes on from there.

    A place is a number of leading tokens. Places whose `least` last tokens have the same hash are chained, so
    a token costs one entry in each of two arrays. A place that was found is kept while the tokens that come
    are those that followed it: the match becomes stronger by each of them.
    """

    __slots__ = (
        *("_answers", "_at", "_earlier", "_heads", "_in_answer", "_least", "_mask", "_most", "_salt"),
        *("_tokens", "expected", "strength"),
    )

    def __init__(
        self,
        tokens: list[int],
        more: int,
        least: int,
        most: int,
        answers: EndedAnswers | None = None,
        salt: int = 0,
    ) -> None:
        """`tokens` are those of the sequence, to which up to `more` are appended later.

        If there are `answers`, a place is sought among those of this salt, too.
        """
        self._tokens = tokens
        self._answers, self._salt, self._in_answer = answers, salt, False
        self._least, self._most = least, most
        room = len(tokens) + min(more, _MORE)
        self._heads = array("i", bytes(4 << max(10, (2 * room).bit_length())))
        """hash -> the latest place with it; 0: none."""
        self._mask = len(self._heads) - 1
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
        tokens, heads, end = self._tokens, self._heads, len(self._earlier)
        at = hash(tuple(tokens[end - self._least : end])) & self._mask
        self._earlier.append(earlier := heads[at])
        heads[at] = end
        if tokens[end - 1] == self.expected:
            self._at += 1
            if self.strength < STRONGEST:
                self.strength += 1
            if self._in_answer:
                self._expect()
            else:
                self.expected = tokens[self._at]
            if self.expected >= 0:
                return
        self.expected = -1
        if earlier or (self._answers is not None and self._answers.may_find(tokens, self._salt)):
            self._find()
        else:
            self.strength = 0

    def draft(self, count: int) -> list[int]:
        """The next tokens as they followed the place; what reaches the end of the text goes on repeating."""
        return self._following(self._at, count, self._in_answer, []) if self.expected >= 0 else []

    def behind(self, sure: list[int], count: int) -> tuple[list[int], int]:
        """What may follow when these tokens have come, and the strength of the match by then."""
        tail = (self._tokens[-self._most :] + sure)[-self._most :]
        if self.draft(len(sure)) == sure:
            at, in_answer = self._at + len(sure), self._in_answer
            strength = min(self.strength + len(sure), STRONGEST)
        elif len(tail) < self._least:
            return [], 0
        else:
            place = self._heads[hash(tuple(tail[-self._least :])) & self._mask]
            at, strength, in_answer = self._search(tail, place, with_answers=True)
        return (self._following(at, count, in_answer, sure) if strength else []), strength

    def _following(self, at: int, count: int, in_answer: bool, sure: list[int]) -> list[int]:
        """The tokens behind a place, as if `sure` ended the text."""
        if in_answer and self._answers is not None:
            return self._answers.following(at, count)
        found = (self._tokens[at : at + count] + sure[max(0, at - len(self._tokens)) :])[:count]
        period = len(self._tokens) + len(sure) - at
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
        mask, first = self._mask, len(earlier)
        if end < first:
            return  # it is too short to have a place
        columns = [tokens[first - least + i : end - least + 1 + i] for i in range(least)]
        for place, last in enumerate(zip(*columns, strict=True), first):
            at = hash(last) & mask
            earlier.append(heads[at])
            heads[at] = place

    def _find(self) -> None:
        """Find the latest of the earlier places at which the most tokens agree with the end."""
        tokens, end = self._tokens, self.read
        tail = tokens[end - self._most : end] if end > self._most else tokens[:end]
        newest = self._answers is not None and end == len(tokens) >= self._least
        found = self._search(tail, self._earlier[end], with_answers=newest)
        self._at, self.strength, self._in_answer = found
        if self.strength:
            self._expect()

    def _search(self, tail: list[int], place: int, *, with_answers: bool) -> tuple[int, int, bool]:
        """The place at which the most tokens agree with these, its strength, and whether it is in an answer.

        It is sought among the places chained from `place`. 0, 0: there is none.
        """
        tokens, most = self._tokens, self._most
        found = strength = 0
        for _ in range(_TRIED):
            if not place:
                break
            if place > strength and tokens[place - 1 - strength] == tail[~strength]:
                agree = 0
                while agree < most and agree < place and tokens[place - 1 - agree] == tail[~agree]:
                    agree += 1
                if agree > strength:
                    found, strength = place, agree
                    if agree == most:
                        break
            place = self._earlier[place]
        if strength < self._least:
            found = strength = 0
        elif strength > STRONGEST:
            strength = STRONGEST
        if with_answers and self._answers is not None and strength < most:
            in_answer, longer = self._answers.find(tail, self._salt)
            if longer > strength:
                return in_answer, min(longer, STRONGEST), True
        return found, strength, False
