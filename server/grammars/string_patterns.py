"""Writes patterns of JSON strings so that the grammar engine lets through no escape that they exclude."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\\P(?:\{[^}]*\}|.)|\\.|\[\^?\]?|\]|[^\\\[\]]+|\\", re.DOTALL)
"""A property that is negated, another escape, the beginning of a class, its end, or characters."""
_REACHES_CONTROLS = re.compile(r"\[:?\^|\\[PWDS]|\\(?:x00|u0000|[xu]\{0+\})-")
"""What a class has that may hold all control characters."""


def for_json_string(pattern: str) -> str:
    r"""The same pattern, whose classes of nearly all characters leave out U+0000.

    llguidance takes a class with all control characters, or all but the line feed, for one of all characters:
    its escapes \" and \\ are let through, even if the class excludes what they stand for.
    """
    written: list[str] = []
    opened: list[int] = []
    for found in _PIECE.finditer(pattern):
        piece = found.group()
        written.append(piece)
        if piece.startswith("["):
            opened.append(len(written) - 1)
        elif piece == "]" and opened:
            begin = opened.pop()
            if not opened:
                written[begin:] = [_without_nul("".join(written[begin:]))]
        elif piece.startswith("\\P") and not opened:
            written[-1] = rf"[{piece}--\x00]"
    return "".join(written)


def _without_nul(characters: str) -> str:
    return rf"[{characters}--\x00]" if _REACHES_CONTROLS.search(characters) else characters
