"""Finds when each word is said, by the cheapest path through a matrix of attention."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from server.speech.transcription import TimedWord

SECONDS_OF_A_COLUMN = 0.02
_NO_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose words have no spaces between them."""
_BEFORE = frozenset("\"'“¿([{-")
_BEHIND = frozenset("\"'.。,，!！?？:：”)]}、")  # noqa: RUF001
"""Marks that go with the word behind them, and with that before."""
_BROKEN = "\ufffd"
_SLACK, _LONGEST = 0.5, 0.7
"""The seconds by which words may lie outside of their segment, and those that they usually take at most."""

Decode = Callable[[Sequence[int]], str]


class Word(NamedTuple):
    """A word, and how many tokens it is made of."""

    text: str
    tokens: int


def warp(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of the way from the first to the last entry whose sum is greatest, and on which
    neither falls. Entries of an anti-diagonal depend on the two before it alone, and are found together."""
    height, width = matrix.shape
    steps = np.full((height + 1, width + 1), 2, np.int8)
    """The step to each entry: 0 from the row and column before, 1 from the row, 2 from the column."""
    steps[1:, 0] = 1
    costs = -matrix.astype(np.float64)
    before = np.full(height + 1, np.inf, np.float32)
    """The cheapest sums on the last diagonal, by row; then on the one before it."""
    older = before.copy()
    before[0] = np.inf
    older[0] = 0.0
    for diagonal in range(2, height + width + 1):
        rows = np.arange(max(1, diagonal - width), min(height, diagonal - 1) + 1)
        columns = diagonal - rows
        both, row, column = older[rows - 1], before[rows - 1], before[rows]
        step = np.where((both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2))
        now = np.full(height + 1, np.inf, np.float32)
        now[rows] = np.choose(step, (both, row, column)) + costs[rows - 1, columns - 1]
        steps[rows, columns] = step
        older, before = before, now
    return _way_back(steps, height, width)


def _way_back(steps: np.ndarray, row: int, column: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = list[int](), list[int]()
    while row > 0 or column > 0:
        rows.append(row - 1)
        columns.append(column - 1)
        step = steps[row, column]
        row -= step != 2
        column -= step != 1
    return np.array(rows[::-1]), np.array(columns[::-1])


def token_times(matrix: np.ndarray) -> np.ndarray:
    """The seconds at which each row [tokens, columns] begins."""
    if not matrix.size:
        return np.zeros(len(matrix))
    rows, columns = warp(matrix)
    return columns[np.diff(rows, prepend=-1) > 0] * SECONDS_OF_A_COLUMN


def split_words(tokens: Sequence[int], decode: Decode, language: str) -> list[Word]:
    """The words of a text. Marks belong to the words beside them."""
    found = list[Word]()
    for text, count in _characters(tokens, decode):
        begins = text.startswith(" ") or text.strip() in string.punctuation
        if language in _NO_SPACES or begins or not found:
            found.append(Word(text, count))
        else:
            found[-1] = _joined(found[-1], Word(text, count))
    return _with_marks(found)


def without_silence(words: Sequence[TimedWord], start: float, end: float) -> list[TimedWord]:
    """The words of a segment, without the silence before the first and behind the last one, which the way
    through the matrix gives to either. They are cut as OpenAI's Whisper does it: where the segment begins and
    ends, but not to less than words usually take."""
    if not words:
        return []
    found, usual = list(words), min(_LONGEST, float(np.median([word.end - word.start for word in words])))
    if found[0].start < start - _SLACK and start < found[0].end:
        found[0] = replace(found[0], start=round(max(0.0, min(start, found[0].end - usual)), 2))
    if found[-1].end > end + _SLACK and end > found[-1].start:
        found[-1] = replace(found[-1], end=round(max(end, found[-1].start + usual), 2))
    return found


def _characters(tokens: Sequence[int], decode: Decode) -> list[Word]:
    """Tokens as far as they are whole characters."""
    found, held = list[Word](), list[int]()
    for token in tokens:
        held.append(token)
        if _BROKEN not in (text := decode(held)):
            found.append(Word(text, len(held)))
            held = []
    return [*found, Word(decode(held), len(held))] if held else found


def _with_marks(words: Sequence[Word]) -> list[Word]:
    found, before = list[Word](), Word("", 0)
    for word in words:
        mark = word.text.strip()
        if word.text.startswith(" ") and mark in _BEFORE:
            before = _joined(before, word)
        elif found and not before.tokens and mark in _BEHIND and not word.text.startswith(" "):
            found[-1] = _joined(found[-1], word)
        else:
            found.append(_joined(before, word))
            before = Word("", 0)
    return [*found, before] if before.tokens else found


def _joined(one: Word, other: Word) -> Word:
    return Word(one.text + other.text, one.tokens + other.tokens)
