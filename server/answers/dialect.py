"""A dialect: how a family of models writes tool calls, and the markers of its reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

from server.answers.calls import Calls
from server.answers.source import Reading
from server.grammars.tool_grammar import Lark, ToolForm

Described = TypeVar("Described")


class CallFormat(Protocol):
    """A way to write calls."""

    def read(self, calls: Calls, opener: str) -> Reading[None]:
        """Read all calls behind this opener. If there is none, return before any has begun."""
        ...

    def write(self, lark: Lark, tools: Sequence[ToolForm], opener: str, several: bool) -> str:
        """An expression of what stands behind this opener: one call, or as many as stand behind one opener.

        `several`: whether there may be more than one.
        """
        ...

    def holds_several(self, opener: str) -> bool:
        """Whether one opener stands before several calls; otherwise each has its own."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    """Its name in the options, which is the peers'."""
    opens: tuple[str, ...]
    """The literals with which calls begin."""
    format: CallFormat
    only_first: bool = False
    """Whether calls are the whole message, so that the openers mean nothing behind other text."""
    hides: tuple[str, ...] = ()
    """Markup around the text of an answer, which is no part of it."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The markers of reasoning."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    hides: tuple[str, ...] = ()
    """Markup around the text of an answer, which is no part of it."""
    then: str = ""
    """What stands between the reasoning and an answer or a call."""
    answers: str = ""
    """What stands before the text of an answer, if that is held to a form."""
    told_by: tuple[str, ...] = ()
    """The literals by which it is recognized, if `closes` stand for other things in other families."""


def with_marks(described: Described, marks: Mapping[str, str]) -> Described:
    """The same dialect or thinking, with the mark of each special token in place of its text."""
    return _with_marks(described, marks)


def _with_marks(value: Any, marks: Mapping[str, str]) -> Any:
    match value:
        case str():
            for token, mark in marks.items():
                value = value.replace(token, mark)
            return value
        case tuple():
            return tuple(_with_marks(each, marks) for each in value)
        case Mapping():
            return {_with_marks(key, marks): each for key, each in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            changed = {each.name: _with_marks(getattr(value, each.name), marks) for each in fields(value)}
            return replace(value, **changed)
        case _:
            return value
