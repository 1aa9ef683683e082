"""Values that a dialect writes in a form of its own, nested as a tool's schema says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from server.answers.formats.schema_types import resolved, types_in
from server.answers.writing.arguments import Member, is_string, json_argument, members_of
from server.grammars.tool_grammar import Lark, ToolForm

_OF_ARRAYS = frozenset({"type", "items", "title", "description", "default", "examples"})
_ALTERNATIVES = ("anyOf", "oneOf")
_MOST_DEPTH = 8


class ValueForm(Protocol):
    """How a dialect writes values that are not all of one JSON text."""

    def write_string(self, lark: Lark, tool: ToolForm, schema: object, name: str) -> str: ...
    def write_object(self, lark: Lark, members: list[tuple[Member, str]], name: str) -> str: ...
    def write_array(self, lark: Lark, item: str, name: str) -> str: ...
    def write_other(self, lark: Lark, json: str, name: str) -> str: ...
    def write_any(self, lark: Lark, name: str) -> str:
        """Any value, of which the schema says nothing."""
        ...


def write_value(
    form: ValueForm, lark: Lark, tool: ToolForm, schema: object, name: str, depth: int = 0
) -> str:
    """A value of a part of the tool's schema; `name` is the key or the element in which it stands."""
    described = resolved(schema, tool.schema)
    types = types_in(schema, tool.schema)
    if not isinstance(described, Mapping) or not types or depth == _MOST_DEPTH:
        if depth == _MOST_DEPTH:
            lark.drop(tool, "$ref")
        return form.write_any(lark, name)
    if is_string(tool, schema):
        return form.write_string(lark, tool, schema, name)
    for keyword in _ALTERNATIVES:
        if keyword in described:
            each_of = [each for each in described[keyword] if isinstance(each, Mapping)]
            return lark.one_of(write_value(form, lark, tool, each, name, depth + 1) for each in each_of)
    if len(types) > 1:
        each_of = [{**described, "type": one} for one in sorted(types)]
        return lark.one_of(write_value(form, lark, tool, each, name, depth + 1) for each in each_of)
    if types == {"object"}:
        members = members_of(lark, tool, described)
        if members is None:
            return form.write_any(lark, name)
        written = [
            (each, write_value(form, lark, tool, each.schema, each.name, depth + 1)) for each in members
        ]
        return form.write_object(lark, written, name)
    if types == {"array"}:
        for keyword in described.keys() - _OF_ARRAYS:
            lark.drop(tool, keyword)
        item = write_value(form, lark, tool, described.get("items", {}), "item", depth + 1)
        return form.write_array(lark, item, name)
    return form.write_other(lark, json_argument(lark, tool, described), name)
