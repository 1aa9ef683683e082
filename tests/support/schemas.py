"""Schemas of every kind that is enforced, small enough for a model that writes at random to end."""

from __future__ import annotations

import random
from typing import Any

from shape_files import read_shapes

Schema = dict[str, Any]


def an_object(required: list[str] | None = None, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
    }


def a_list(items: Schema, most: int = 3, **more: object) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


SCHEMAS: dict[str, Schema] = read_shapes("schemas")

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
