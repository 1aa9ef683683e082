"""Marks: single characters that stand for special tokens while an answer is read."""

from __future__ import annotations

FIRST_MARK = 0xD800
"""The first of the lone surrogates, which text decoded from UTF-8 never has."""
MOST_MARKS = 0x800


def is_mark(text: str) -> bool:
    """Whether a text is the mark of a special token."""
    return len(text) == 1 and FIRST_MARK <= ord(text) < FIRST_MARK + MOST_MARKS
