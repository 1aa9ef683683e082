"""Parsers of the operator's own: Python files that register how models write calls and reasoning."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from functools import cache

from server.output_parsing.dialect import Dialect, ThinkingMarkers
from server.output_parsing.tool_call_dialects import (
    ALIASES,
    AUTO,
    DIALECTS_BY_NAME,
    NONE,
    THINKING_BY_NAME,
)


def register_tool_parser(dialect: Dialect) -> None:
    """Let --tool-call-parser name this way to write calls. Raises ValueError if there is one of its name."""
    if dialect.name in {AUTO, NONE, *DIALECTS_BY_NAME, *ALIASES}:
        raise ValueError(f"there is a tool parser named {dialect.name!r} already")
    DIALECTS_BY_NAME[dialect.name] = dialect


def register_reasoning_parser(markers: ThinkingMarkers) -> None:
    """The same for --reasoning-parser, and the markers of reasoning."""
    if markers.name in {AUTO, NONE, *THINKING_BY_NAME}:
        raise ValueError(f"there is a reasoning parser named {markers.name!r} already")
    THINKING_BY_NAME[markers.name] = markers


def load_parsers(files: Mapping[str, str]) -> None:
    """Run the files that flags name, once in a process. Raises ValueError if one cannot be used."""
    for flag, file in files.items():
        _run(flag, file)


@cache
def _run(flag: str, file: str) -> None:
    try:
        runpy.run_path(file)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{flag} {file} cannot be used: {why} (docs/plugins.md says what it may do)"
        ) from error
