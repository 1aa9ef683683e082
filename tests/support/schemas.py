"""Schemas of every kind that is enforced, small enough for a model that writes at random to end."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "maxLength": 6}
SMALL: Schema = {"type": "integer", "minimum": -9, "maximum": 9}


def an_object(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
    }


def a_list(items: Schema, most: int = 3, **more: object) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


_NODE = an_object(["value"], value=SMALL, next={"$ref": "#/$defs/leaf"})
_LEAF = an_object(["value"], value=SMALL)

SCHEMAS: dict[str, Schema] = {
    "string": WORD,
    "string of a length": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern of other characters": {"type": "string", "pattern": r'^[^"\\]{1,6}$'},
    "pattern inside": {"type": "string", "pattern": "ab", "maxLength": 6},
    "enum": {"enum": ["red", "green", 3, None, True, [1], {"a": 1}]},
    "enum with quotes": {"enum": ['say "x"', "back\\slash", "new\nline", "Zoë 😀"]},
    "const": {"const": {"a": [1, None]}},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": SMALL,
    "integer above": {"type": "integer", "exclusiveMinimum": 7, "maximum": 120},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "several types": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    "list": a_list(SMALL),
    "list of a length": a_list(SMALL, 4, minItems=2),
    "list of lists": a_list(a_list({"type": "boolean"}), 2),
    "tuple": {"type": "array", "prefixItems": [WORD, SMALL], "items": False, "minItems": 2},
    "empty list": {"type": "array", "maxItems": 0},
    "object": an_object(name=WORD, age=SMALL),
    "optional": an_object(["name"], name=WORD, age=SMALL, email=WORD),
    "all optional": an_object([], a=SMALL, b=SMALL, c=SMALL),
    "nested": an_object(inner=an_object(deep=an_object(deepest=SMALL))),
    "list of objects": a_list(an_object(id=SMALL, ok={"type": "boolean"}), 2),
    "no properties": {"type": "object", "properties": {}},
    "map": {"type": "object", "additionalProperties": SMALL, "maxProperties": 2},
    "map with a pattern": {
        "type": "object",
        "patternProperties": {"^[a-c]$": SMALL},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "names to be escaped": an_object(**{'a"b': SMALL, "c\\d": SMALL, "é": SMALL}),
    "anyOf": {"anyOf": [SMALL, {"type": "boolean"}, an_object(x=SMALL)]},
    "oneOf": {"oneOf": [an_object(kind={"const": "a"}, x=SMALL), an_object(kind={"const": "b"}, y=WORD)]},
    "allOf": {"allOf": [an_object(a=SMALL), an_object(b=SMALL)], "maxProperties": 2},
    "optional value": an_object(v={"anyOf": [WORD, {"type": "null"}]}),
    "reference": {"$ref": "#/$defs/leaf", "$defs": {"leaf": _LEAF}},
    "references": {**_NODE, "$defs": {"leaf": _LEAF}},
    "definitions": {"definitions": {"w": WORD}, **an_object(w={"$ref": "#/definitions/w"})},
    "date": {"type": "string", "format": "date"},
    "time of a day": an_object(at={"type": "string", "format": "date-time"}),
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "described": {
        "title": "T",
        "description": "d",
        "$schema": "x",
        **an_object(a=SMALL),
        "examples": [{"a": 1}],
    },
}

_CLASSES = [
    r'[^"\\]',
    r'[^"]',
    r"[^\\]",
    r"[^a-m]",
    r'[^"\n]',
    r'[^\x00-\x1f"]',
    r"[^\x20-~]",
    ".",
    r'["\\x-z]',
    "[^/]",
]
_BOUNDS = [0, 9, 10**6, 2**53, 2**53 + 1, 10**18 + 1, 2**63 - 1, 2**64]
_NAMES = ["a", "b", "city", "unit x", 'say "y"', "é"]
_SIMPLE = [name for name, schema in SCHEMAS.items() if "$ref" not in str(schema)]


def random_leaf(rng: random.Random) -> Schema:
    """A string of characters that a pattern describes, or a number within bounds, all drawn by chance."""
    if rng.random() < 0.6:
        parts = [f"{rng.choice(_CLASSES)}{{1,{rng.randint(1, 4)}}}" for _ in range(rng.randint(1, 3))]
        return {"type": "string", "pattern": f"^{'-'.join(parts)}$"}
    low = rng.choice([-1, 1]) * rng.choice(_BOUNDS[:-2]) + rng.randint(-9, 9)
    high = rng.choice(_BOUNDS) + rng.randint(-9, 9)
    names = [rng.choice([f"{side}imum", f"exclusive{side.capitalize()}imum"]) for side in ("min", "max")]
    schema: Schema = {"type": rng.choice(["integer", "number"]), names[0]: low, names[1]: high}
    return schema if low + 10**5 < high else {"type": "integer", names[rng.randint(0, 1)]: high}


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """A schema drawn by chance, of those above and of objects, lists and choices of them."""
    match rng.choice(["simple", "object", "list", "either"]) if depth else "simple":
        case "object":
            names = rng.sample(_NAMES, rng.randint(1, 3))
            parts = {name: random_schema(rng, depth - 1) for name in names}
            return an_object([name for name in names if rng.random() < 0.5], **parts)
        case "list":
            return a_list(random_schema(rng, depth - 1), 2, minItems=rng.randint(0, 1))
        case "either":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case _:
            return SCHEMAS[rng.choice(_SIMPLE)]
