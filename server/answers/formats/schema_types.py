"""What a tool's schema says of the type of an argument that is written without JSON's quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_DEPTH = 8
"""How many references and alternatives are followed."""


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that an argument may have; none if the schema does not say."""
    return types_in(child_of(schema, key, schema), schema)


def types_in(described: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a part of the schema `root` allows; none if it does not say."""
    return _types(described, root, _DEPTH)


def child_of(described: object, key: str, root: Mapping[str, Any]) -> object:
    """What a part of the schema `root` says of its property `key`, or of its items if it lists none."""
    described = resolved(described, root)
    if not isinstance(described, Mapping):
        return None
    properties = described.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else described.get("items")


def resolved(described: object, root: Mapping[str, Any]) -> object:
    """What a part of the schema `root` refers to, or the part itself if it does not."""
    for _ in range(_DEPTH):
        if not isinstance(described, Mapping) or not isinstance(reference := described.get("$ref"), str):
            break
        described = _resolve(reference, root)
    return described


def takes_strings_only(schema: Mapping[str, Any], key: str) -> bool:
    """Whether an argument can pass as it comes, because it is a string whatever it looks like."""
    return types_of(schema, key) == {"string"}


def value_for(schema: Mapping[str, Any], key: str, text: str) -> Any:
    """The value of an argument that a text stands for."""
    return typed_value(child_of(schema, key, schema), schema, text)


def typed_value(described: object, root: Mapping[str, Any], text: str) -> Any:
    """The value that a text stands for: JSON where the schema allows its type, else the text itself."""
    types = types_in(described, root)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered == "true"
        if lowered in ("none", "null") and (not types or "null" in types):
            return None
        return text
    if types and _type_of(value) not in types and not ("number" in types and _type_of(value) == "integer"):
        return text if "string" in types else value
    return value


def _types(described: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(described, Mapping) or depth == 0:
        return frozenset()
    if isinstance(reference := described.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth - 1)
    match described.get("type"):
        case str() as one:
            return frozenset({one})
        case list() as several:
            return frozenset(each for each in several if isinstance(each, str))
        case _:
            pass
    if isinstance(values := described.get("enum"), list):
        return frozenset(_type_of(value) for value in values)
    if "const" in described:
        return frozenset({_type_of(described["const"])})
    found: frozenset[str] = frozenset()
    for keyword in ("anyOf", "oneOf", "allOf"):
        alternatives = described.get(keyword)
        for each in alternatives if isinstance(alternatives, list) else ():
            found |= _types(each, root, depth - 1)
    return found


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference within the schema names."""
    found: object = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


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
