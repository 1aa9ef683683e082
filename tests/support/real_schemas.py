"""Schemas such as applications send: records, lists, trees, unions, tables of many fields."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from shape_files import read_shapes

Schema = dict[str, Any]

_WORDS = re.findall(
    r"\w+",
    """
account address amount answer author balance billing category city code comment company contact country
created currency customer date delivery description discount due email end event external first gender
height id invoice item job label language last length level line location manager message method middle
mobile month name note number order origin owner page parent payment percent person phone position postal
price priority product quantity rating reason record region release report result role sale score section
sender shipping size source start state status street subject summary supplier tag target tax team text
title total type unit updated url user value version weight width year zone
""",
)
_FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "uri", "hostname")
_PATTERNS = (
    r"^[A-Z]{2}-[0-9]{4,8}$",
    r"^\+?[0-9 ()-]{6,20}$",
    r"^[a-z0-9]+(-[a-z0-9]+)*$",
    r"^#[0-9a-fA-F]{6}$",
    r"^(19|20)\d{2}-(0[1-9]|1[0-2])$",
    r"^[A-Z][a-z]+(?: [A-Z][a-z]+)*$",
    r"^[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,60}\.[A-Za-z]{2,8}$",
)


def an_object(properties: Schema, required: list[str] | None = None, **more: object) -> Schema:
    wanted = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": wanted, **more}


def _names(count: int) -> list[str]:
    """So many names of fields, all different."""
    ones = _WORDS[:count]
    pairs = [f"{one}_{other}" for one in _WORDS for other in _WORDS if one != other]
    return (ones + random.Random(count).sample(pairs, max(0, count - len(ones))))[:count]


def _field(rng: random.Random) -> Schema:
    kinds: list[Callable[[], Schema]] = [
        lambda: {"type": "string"},
        lambda: {"type": "string", "description": "What is known of it, in a sentence."},
        lambda: {"type": "string", "minLength": 1, "maxLength": rng.choice((20, 100, 255, 2000))},
        lambda: {"type": "string", "format": rng.choice(_FORMATS)},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"type": "integer"},
        lambda: {"type": "integer", "minimum": 0, "maximum": rng.choice((10, 100, 86_400, 10**9))},
        lambda: {"type": "number", "minimum": 0, "maximum": 1},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"type": ["string", "null"]},
        lambda: {"anyOf": [{"type": "number"}, {"type": "null"}]},
        lambda: {"enum": rng.sample(_WORDS, rng.randint(2, 12))},
        lambda: {"type": "array", "items": {"type": "string"}},
        lambda: {"type": "array", "items": {"enum": rng.sample(_WORDS, 5)}, "minItems": 1, "maxItems": 10},
        lambda: {"type": "object", "additionalProperties": {"type": "string"}},
    ]
    return rng.choice(kinds)()


def _record(rng: random.Random, fields: int, optional: float = 0.3) -> Schema:
    properties = {name: _field(rng) for name in _names(fields)}
    return an_object(properties, [name for name in properties if rng.random() >= optional])


def _union(rng: random.Random, variants: int) -> Schema:
    """Objects that a constant in their first field tells apart, as unions of Pydantic's models are."""
    kinds: list[Schema] = []
    for number in range(variants):
        record = _record(rng, rng.randint(1, 6))
        fields = {"kind": {"const": f"kind_{number}"}, **record["properties"]}
        kinds.append(an_object(fields, ["kind", *record["required"]]))
    return an_object({"actions": {"type": "array", "items": {"anyOf": kinds}}})


def _untold_union(rng: random.Random, variants: int) -> Schema:
    """Objects of the same beginning, which only later fields tell apart."""
    kinds = [
        an_object({"name": {"type": "string"}, "id": {"type": "integer"}, f"v{n}": _field(rng)})
        for n in range(variants)
    ]
    return {"anyOf": kinds}


def _tree(rng: random.Random, kinds: int) -> Schema:
    """Nodes that have others, as for pages, filters, expressions and organisations."""
    definitions: Schema = {}
    for number in range(kinds):
        node = _record(rng, 3)
        node["properties"]["children"] = {
            "type": "array",
            "items": {"anyOf": [{"$ref": f"#/$defs/node_{other}"} for other in range(kinds)]},
        }
        node["properties"] = {"kind": {"const": f"node_{number}"}, **node["properties"]}
        node["required"] = ["kind", *node["required"], "children"]
        definitions[f"node_{number}"] = node
    return {"$defs": definitions, "$ref": "#/$defs/node_0"}


def _tables(rng: random.Random) -> Iterator[tuple[str, Schema]]:
    for count in (10, 30, 100, 300, 600, 900):
        plain: Schema = {name: {"type": "string"} for name in _names(count)}
        mixed: Schema = {name: _field(rng) for name in _names(count)}
        yield f"{count} optional fields", an_object(plain, [])
        yield f"{count} required fields", an_object(plain)
        if count <= 300:
            yield f"{count} optional fields of many kinds", an_object(mixed, [])
            yield f"{count} fields of many kinds", an_object(mixed)
    for count in (50, 200, 1000):
        yield f"one of {count} words", {"enum": _names(count)}
        yield f"lists of {count} words", {"type": "array", "items": {"enum": _names(count)}}


def real_schemas() -> dict[str, Schema]:
    """The schemas by name; the same ones in every process."""
    rng = random.Random(7)
    found: dict[str, Schema] = dict(_tables(rng))
    for name, schema in read_shapes("recursive").items():
        found["any JSON" if name == "json" else name] = {"$defs": {name: schema}, "$ref": f"#/$defs/{name}"}
    found["any object"] = {"type": "object"}
    for number in range(30):
        record = _record(rng, rng.randint(1, 40))
        found[f"record {number}"] = {"type": "array", "items": record} if number % 3 == 2 else record
    for variants in (2, 3, 5, 8, 12, 20, 30, 40, 60):
        found[f"union of {variants}"] = _union(rng, variants)
        found[f"untold union of {variants}"] = _untold_union(rng, variants)
    for kinds in (1, 2, 3, 5, 8, 12, 20, 30):
        found[f"tree of {kinds}"] = _tree(rng, kinds)
    return found
