"""Patterns that name modules. Anybody may have written them, so they must not run for ever. No torch."""

from __future__ import annotations

import re
from functools import cache
from re import _constants as codes  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from typing import Any

from models.config import ConfigError

_MOST_REPEATS = 4
"""Unbounded repetitions of a pattern: each may try as many ends as a module's name has characters."""
_MOST_CHARACTERS = 1000
_REPEATS = {codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT}


@cache
def compiled(pattern: str, place: str) -> re.Pattern[str]:
    """Compile a regular expression of a checkpoint; `place` names its file and field in a refusal."""
    problem = ""
    try:
        if len(pattern) > _MOST_CHARACTERS:
            problem = f"it has more than {_MOST_CHARACTERS} characters"
        elif _count_repeats(parser.parse(pattern)) > _MOST_REPEATS:
            problem = f"it repeats more than {_MOST_REPEATS} parts, or parts that repeat or branch"
        else:
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        problem = str(error)
    shown = pattern if len(pattern) <= 40 else f"{pattern[:37]}..."
    raise ConfigError(f"{place}: pattern {shown!r} is not used: {problem}; name the modules in full")


def _count_repeats(tree: Any, inside: bool = False) -> int:
    """The number of repetitions of a parsed pattern; far too many if one lies `inside` another."""
    count = 0
    for code, value in tree:
        if code in _REPEATS and value[1] > 1:
            count += (1 if not inside else _MOST_REPEATS + 1) + _count_repeats(value[2], inside=True)
        elif code in (codes.BRANCH, codes.GROUPREF, codes.GROUPREF_EXISTS) and inside:
            count += _MOST_REPEATS + 1
        else:
            count += sum(_count_repeats(part, inside) for part in _parts(value))
    return count


def _parts(value: Any) -> list[Any]:
    """The patterns within a part of a parsed pattern."""
    if isinstance(value, parser.SubPattern):
        return [value]
    if isinstance(value, list | tuple):
        return [part for each in value for part in _parts(each)]
    return []
