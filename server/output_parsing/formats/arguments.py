"""Reads arguments that are written one by one, and not as one JSON object, by a tool's schema."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from server.output_parsing.formats.call_format import CallGrammar, ToolForm

_MOST_DEPTH = 8
"""How many references and alternatives are followed."""
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
_DIGITS = re.compile("[+-]?[0-9]{1,30}")
_NAMES = {"null": None, "true": True, "false": False}
_OF_ARRAYS = frozenset({"type", "items", "title", "description", "default", "examples"})


# Reading: types of values, and values of texts.


def types_in(described: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a part of the schema `root` allows; none if it does not say."""
    found = set[str]()
    for part in _parts_of(described, root, _own_types):
        found |= _own_types(part)
    return frozenset(found)


def _own_types(part: Mapping[str, Any]) -> set[str]:
    """The types that a part names itself, whatever its alternatives say."""
    match part:
        case {"type": str(one)}:
            return {one}
        case {"type": list(several)}:
            return {each for each in several if isinstance(each, str)}
        case {"enum": list(values)}:
            return set(map(_type_of, values))
        case {"const": value}:
            return {_type_of(value)}
        case _:
            return set()


def child_of(described: object, key: str, root: Mapping[str, Any]) -> object:
    """What a part of the schema `root` says of its property `key`, or of its items if it lists none."""
    found = list[object]()
    for part in _parts_of(described, root):
        properties = part.get("properties")
        child = properties.get(key) if isinstance(properties, Mapping) else part.get("items")
        if child is not None:
            found.append(child)
    return {"anyOf": found} if len(found) > 1 else found[0] if found else None


def _parts_of(
    described: object, root: Mapping[str, Any], says_all: Callable[[Mapping[str, Any]], object] | None = None
) -> Iterator[Mapping[str, Any]]:
    """A part of a schema and its alternatives, each once, but for those of parts that say all themselves."""
    seen, waiting = set[int](), [described]
    while waiting:
        part = resolved(waiting.pop(), root)
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if says_all is None or not says_all(part):
            lists = (part.get(keyword) for keyword in ("anyOf", "oneOf", "allOf"))
            waiting += [each for several in lists if isinstance(several, list) for each in several]


def resolved(described: object, root: Mapping[str, Any]) -> object:
    """What a part of the schema `root` refers to, or the part itself if it does not."""
    for _ in range(_MOST_DEPTH):
        if not isinstance(described, Mapping) or not isinstance(reference := described.get("$ref"), str):
            break
        described = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            described = described.get(step) if isinstance(described, Mapping) else None
    return described


def typed_value(described: object, root: Mapping[str, Any], text: str) -> Any:
    """The value that a text stands for: JSON where the schema allows its type, else the text itself.

    Models write Python's literals, too, which are read where the value cannot be a string.
    """
    types = types_in(described, root)
    try:
        value = value_spelled(text, python=bool(types) and "string" not in types)
    except ValueError:
        lowered = text.strip().lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered == "true"
        if lowered in ("none", "null") and (not types or "null" in types):
            return None
        if "integer" in types and "string" not in types and _DIGITS.fullmatch(lowered):
            return int(lowered)
        return text
    if types and _type_of(value) not in types and not ("number" in types and _type_of(value) == "integer"):
        return text if "string" in types else value
    return value


def value_spelled(text: str, *, python: bool = False) -> Any:
    """The value that a text spells as JSON, or else as a literal of Python. Strings may have line ends.

    Raises ValueError if it spells none, or one that JSON does not have, such as NaN.
    """
    for read in (_from_json, _from_python, _from_lines) if python else (_from_json,):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return json.loads(json.dumps(read(text), allow_nan=False))
    raise ValueError("the text spells no value of JSON")


def _from_json(text: str) -> Any:
    return json.loads(text, parse_float=_nearest, strict=False)


def _from_python(text: str) -> Any:
    return _literal(ast.parse(text.strip(), mode="eval").body)


def _from_lines(text: str) -> Any:
    return _from_python(text.replace("\n", "\\n"))


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal of Python, in which JSON's names may stand, and whose sets are lists."""
    match node:
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys, values):
            return {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case None:  # what `**` unpacks
            raise ValueError("this is no literal")
        case _:
            return ast.literal_eval(node)


def _nearest(number: str) -> float:
    """The nearest float that is finite, as JSON has no other."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


# Writing: expressions of the values that a schema allows.


@dataclass(frozen=True, slots=True)
class Member:
    """A property of an object."""

    name: str
    schema: object
    required: bool


def members_of(lark: CallGrammar, tool: ToolForm, schema: object) -> list[Member] | None:
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


def in_order(lark: CallGrammar, members: Iterable[tuple[str, bool]], between: str) -> str:
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


def json_argument(lark: CallGrammar, tool: ToolForm, schema: object) -> str:
    """JSON of a part of the tool's schema, whose references still lead to the whole."""
    part = schema if isinstance(schema, Mapping) else {}
    definitions = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references(part)):
        lark.drop(tool, "$ref")
        return lark.json_of({})
    return lark.json_of({**part, **definitions}, strict=tool.strict)


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


def raw_string(lark: CallGrammar, tool: ToolForm, schema: object, end: str, newline: str = "") -> str:
    """A string without quotes, and the literal that ends it, which may stand on a new line."""
    described = resolved(schema, tool.schema)
    described = described if isinstance(described, Mapping) else {}
    for keyword in described.keys() - _OF_STRINGS:
        lark.drop(tool, keyword)
    for keyword in ("enum", "const"):
        if keyword in described:
            values = described["enum"] if keyword == "enum" else [described["const"]]
            texts = [value for value in values if isinstance(value, str) and end not in value]
            if len(texts) < len(values):
                lark.drop(tool, keyword)
            if texts:
                return lark.one_of(lark.literal(text + newline + end) for text in texts)
    least, most = described.get("minLength", 0), described.get("maxLength")
    bounds = least if isinstance(least, int) else 0, most if isinstance(most, int) else None
    return lark.raw(end, *bounds, newline)


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


class NestedFormat(Protocol):
    """A dialect's way to write objects and arrays that are no JSON."""

    def write_string(self, lark: CallGrammar, tool: ToolForm, schema: object, name: str) -> str: ...
    def write_object(self, lark: CallGrammar, members: list[tuple[Member, str]], name: str) -> str: ...
    def write_array(self, lark: CallGrammar, item: str, name: str) -> str: ...
    def write_other(self, lark: CallGrammar, json: str, name: str) -> str: ...
    def write_any(self, lark: CallGrammar, name: str) -> str:
        """Any value, of which the schema says nothing."""
        ...


def write_members(
    form: NestedFormat, lark: CallGrammar, tool: ToolForm, schema: object, depth: int = 0
) -> list[tuple[Member, str]] | None:
    """The members of an object, each with the expression of its value; None if it may have any."""
    members = members_of(lark, tool, schema)
    if members is None:
        return None
    return [(each, write_value(form, lark, tool, each.schema, each.name, depth)) for each in members]


def write_value(
    form: NestedFormat, lark: CallGrammar, tool: ToolForm, schema: object, name: str, depth: int = 0
) -> str:
    """A value of a part of the tool's schema; `name` is the key or the element in which it stands."""
    described = resolved(schema, tool.schema)
    types = types_in(schema, tool.schema)
    if depth == _MOST_DEPTH:
        lark.drop(tool, "$ref")
    if not isinstance(described, Mapping) or not types or depth == _MOST_DEPTH:
        return form.write_any(lark, name)
    if is_string(tool, schema):
        return form.write_string(lark, tool, schema, name)
    alternatives: list[Any] = []
    if keyword := next((each for each in ("anyOf", "oneOf") if each in described), ""):
        alternatives = [each for each in described[keyword] if isinstance(each, Mapping)]
    elif len(types) > 1:
        alternatives = [{**described, "type": one} for one in sorted(types)]
    if alternatives:
        return lark.one_of(write_value(form, lark, tool, each, name, depth + 1) for each in alternatives)
    if types == {"object"}:
        members = write_members(form, lark, tool, described, depth + 1)
        return form.write_any(lark, name) if members is None else form.write_object(lark, members, name)
    if types == {"array"}:
        for keyword in described.keys() - _OF_ARRAYS:
            lark.drop(tool, keyword)
        item = write_value(form, lark, tool, described.get("items", {}), "item", depth + 1)
        return form.write_array(lark, item, name)
    return form.write_other(lark, json_argument(lark, tool, described), name)
