"""What a tool's schema says of arguments that are written one by one, without the braces of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.answers.formats.schema_types import resolved, types_in
from server.grammars.tool_grammar import Lark, ToolForm

_SAID_ELSEWHERE = frozenset(
    {
        "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id",
        "title", "description", "default", "examples", "deprecated", "$comment", "x-guidance",
    }
)  # fmt: skip
"""Keywords of an object that its members satisfy, or that ask for nothing."""
_OF_STRINGS = frozenset({"type", "enum", "const", "minLength", "maxLength"}) | _SAID_ELSEWHERE
_UNBOUND = frozenset({"type", "anyOf", "title", "description", "default", "examples"})
"""Keywords that say no more of a value than its type."""
_LISTED = ("enum", "const")


@dataclass(frozen=True, slots=True)
class Member:
    """A property of an object."""

    name: str
    schema: object
    required: bool


def members_of(lark: Lark, tool: ToolForm, schema: object) -> list[Member] | None:
    """The members of an object in the order of its schema; None if it may have any."""
    described = resolved(schema, tool.schema)
    if not isinstance(described, Mapping):
        return None
    for keyword in described.keys() - _SAID_ELSEWHERE:
        lark.drop(tool, keyword)
    properties = described.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = [name for name in described.get("required") or () if isinstance(name, str)]
    if not properties and not required and described.get("additionalProperties") is not False:
        return None
    found = [Member(name, each, name in required) for name, each in properties.items()]
    return found + [Member(name, {}, True) for name in required if name not in properties]


def in_order(lark: Lark, members: Iterator[tuple[str, bool]], between: str) -> str:
    """All members that are required and some of the others, in order; may be empty.

    Each is an expression and whether it is required; `between` stands between any two.
    """
    given = list(members)
    if not between:
        return " ".join(each if required else f"({each})?" for each, required in given)
    first: list[str] = []
    rest = ""
    may_be_empty = True
    for each, required in reversed(given):
        begun = lark.sequence(each, rest)
        first = [begun] if required else [begun, *first]
        may_be_empty = may_be_empty and not required
        another = lark.sequence(between, each)
        rest = lark.sequence(another if required else f"({another})?", rest)
    if not first:
        return ""
    return f"({lark.one_of(first)})?" if may_be_empty else lark.one_of(first)


def json_argument(lark: Lark, tool: ToolForm, schema: object) -> str:
    """JSON of a part of the tool's schema, whose references still lead to the whole."""
    part = schema if isinstance(schema, Mapping) else {}
    definitions = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references(part)):
        lark.drop(tool, "$ref")
        return lark.json({}, strict=False)
    return lark.json({**part, **definitions}, strict=tool.strict)


def is_string(tool: ToolForm, schema: object) -> bool:
    """Whether a value is a string whatever it looks like, so that a reader takes it as it stands."""
    return types_in(schema, tool.schema) == {"string"}


def takes_any_text(tool: ToolForm, schema: object) -> bool:
    """Whether any text is right for a value that may be a string: it is one if it is nothing else."""
    types = types_in(schema, tool.schema)
    if types and "string" not in types:
        return False
    described = resolved(schema, tool.schema)
    parts: list[object] = [described]
    if isinstance(described, Mapping):
        parts += [each for keyword in ("anyOf", "oneOf") for each in described.get(keyword) or ()]
    return all(isinstance(part, Mapping) and part.keys() <= _UNBOUND for part in parts)


def raw_string(lark: Lark, tool: ToolForm, schema: object, end: str) -> str:
    """A string without quotes, and the literal that ends it."""
    described = resolved(schema, tool.schema)
    described = described if isinstance(described, Mapping) else {}
    for keyword in described.keys() - _OF_STRINGS:
        lark.drop(tool, keyword)
    for keyword in _LISTED:
        if keyword in described:
            values = described["enum"] if keyword == "enum" else [described["const"]]
            texts = [value for value in values if isinstance(value, str) and end not in value]
            if len(texts) < len(values):
                lark.drop(tool, keyword)
            if texts:
                return lark.one_of(lark.literal(text + end) for text in texts)
    least, most = described.get("minLength", 0), described.get("maxLength")
    return lark.raw(end, least if isinstance(least, int) else 0, most if isinstance(most, int) else None)


def _references(schema: object) -> Iterator[str]:
    waiting: list[Any] = [schema]
    while waiting:
        match waiting.pop():
            case dict() as part:
                if isinstance(reference := part.get("$ref"), str):
                    yield reference
                waiting.extend(part.values())
            case list() as several:
                waiting.extend(several)
            case _:
                pass
