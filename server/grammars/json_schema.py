"""Prepares a client's JSON schema for llguidance: closes its objects, and drops what it must not say.

Patterns of strings are written so that it lets through no escape that they exclude, and bounds of numbers so
that it keeps them, though it reads them as float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from server.errors import BadRequest
from server.grammars.grammar_limits import REPEATING

_PIECE = re.compile(r"\\P(?:\{[^}]*\}|.)|\\.|\[\^?\]?|\]|[^\\\[\]]+|\\", re.DOTALL)
"""A property that is negated, another escape, the beginning of a class, its end, or characters."""
_REACHES_CONTROLS = re.compile(r"\[:?\^|\\[PWDS]|\\(?:x00|u0000|[xu]\{0+\})-")
"""What a class has that may hold all control characters."""


def for_json_string(pattern: str) -> str:
    r"""The same pattern, whose classes of nearly all characters leave out U+0000.

    llguidance takes a class with all control characters, or all but the line feed, for one of all characters:
    its escapes \" and \\ are let through, even if the class excludes what they stand for.
    """
    written: list[str] = []
    opened: list[int] = []
    for found in _PIECE.finditer(pattern):
        piece = found.group()
        written.append(piece)
        if piece.startswith("["):
            opened.append(len(written) - 1)
        elif piece == "]" and opened:
            begin = opened.pop()
            if not opened:
                written[begin:] = [_without_nul("".join(written[begin:]))]
        elif piece.startswith("\\P") and not opened:
            written[-1] = rf"[{piece}--\x00]"
    return "".join(written)


def _without_nul(characters: str) -> str:
    return rf"[{characters}--\x00]" if _REACHES_CONTROLS.search(characters) else characters


EXACT = 1 << 53
"""The largest number up to which float64 has every integer."""
LARGEST = (2**63 - 1) // 640_000 * 640_000
"""The largest bound that is kept: the engine's integers have 64 bits. Float64 has it, with few digits."""

_SIDES = (("minimum", -1), ("maximum", 1))
_KEPT_DIGITS = 15
"""The number of digits with which float64 writes a number as it was read."""
_NEEDS_OTHER = 10**18
"""The engine makes no expression of such numbers without a bound on their other side."""


def enforceable_bounds(schema: Mapping[str, object], param: str) -> dict[str, int]:
    """The bounds to put in place of a schema's own where those are too large to be kept as they are.

    No number between them is outside of the schema's own; a few at their edge are left out. Raises BadRequest
    if there are none.
    """
    found: dict[str, int] = {}
    needs_other: dict[str, bool] = {}
    """The sides that have a bound, and whether the other side needs one for it."""
    for side, sign in _SIDES:
        for key, excluded in ((side, 0), (f"exclusive{side.capitalize()}", 1)):
            if not _is_number(given := schema.get(key)):
                continue
            bound = sign * cast("float", given)  # an upper one, of either side
            if abs(bound) > EXACT - excluded:
                bound = _kept_at_most(math.floor(bound) - excluded)
                if bound is None:
                    limit = f"at most {LARGEST}" if sign < 0 else f"at least -{LARGEST}"
                    raise BadRequest(f"`{key}` of a schema must be {limit}, got {given}.", param)
                found[key] = sign * bound
            needs_other[side] = needs_other.get(side, False) or bound <= -_NEEDS_OTHER
    for side, sign in _SIDES:
        if side not in needs_other and any(needs_other.values()):
            found[side] = sign * LARGEST
    return found


def bounds_left_out(schema: Mapping[str, object]) -> dict[str, float]:
    """Bounds in place of exclusive ones that are whole and less than 1 from the other bound.

    The engine would write such a bound itself. The numbers between it and the one in its place are left out.
    """
    found: dict[str, float] = {}
    for (side, sign), (other, _) in zip(_SIDES, reversed(_SIDES), strict=True):
        exclusive = f"exclusive{side.capitalize()}"
        place = side if schema.get(exclusive) is True else exclusive  # as draft 4 has it
        others = [schema.get(name) for name in (other, f"exclusive{other.capitalize()}")]
        reach = [-sign * cast("float", bound) for bound in others if _is_number(bound)]
        if not reach or not _is_number(bound := schema.get(place)):
            continue
        least, most = -sign * cast("float", bound), min(reach)  # as for a lower bound
        if least >= 0 and least == int(least) and 0 < most - least < 1:
            size = len(str(int(least))) if least else math.floor(math.log10(most))
            found[place] = -sign * (least + 10.0 ** (size - _KEPT_DIGITS))
    return found


def check_constants(value: object, param: str) -> None:
    """Refuses numbers of `const` and `enum` that the engine would write as others."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
        elif _is_number(one) and abs(cast("float", one)) > EXACT:
            raise BadRequest(
                f"Numbers in `const` and `enum` of a schema may be up to 2^53, got {one}: larger ones would "
                "not be written exactly. Give them as strings.",
                param,
            )


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _kept_at_most(bound: int) -> int | None:
    """The largest integer up to a bound that float64 keeps and writes as it is; None if there is none."""
    if bound < -LARGEST:
        return None
    bound = min(bound, LARGEST)
    unit = 10 ** max(0, len(str(abs(bound))) - _KEPT_DIGITS)
    kept = bound // unit * unit
    while int(float(kept)) > bound:
        kept -= unit
    return kept


Schema = dict[str, Any]

_OPTIONS = "x-guidance"
"""The keyword with which llguidance is told how to work, which is for us to say."""

_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords with a list of schemas."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords with schemas under names."""
_NO_SCHEMAS = ("const", "enum", "default", "example", "dependentRequired", _OPTIONS)
"""Keywords whose objects are none. Those of any other one are schemas, or hold some to which others refer."""
_SAYS_OF_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
"""Keywords with which a schema says what other properties its objects may have."""

_NEUTRAL: Mapping[str, object] = {
    "uniqueItems": False,
    "minItems": 0,
    "minLength": 0,
    "minProperties": 0,
    "additionalItems": True,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "propertyNames": True,
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
}
"""Values with which a keyword asks for nothing: llguidance may not know the keyword."""

_DRAFTS = "//json-schema.org/draft"
_NAMING = ("properties", "patternProperties")
_ESCAPES = 'nrbtf\\"'
"""The letters of escapes but u, which writes names in ways of which the grammar engine knows only one."""

_COUNTING = ("minProperties", "maxProperties")
"""Keywords that llguidance can follow only in objects of which all properties are required, or unnamed."""


def prepare_schema(schema: Schema, param: str, *, closed: bool | None, counts: bool = True) -> Schema:
    """The schema to compile.

    `closed`: whether objects may have no properties but those that are named, where the schema does not say
    otherwise; None: where it names some. `counts`: whether the properties of such objects are counted.
    """
    _check_references(schema, param)
    stay_open = set[int]() if closed is False else _extended(schema)
    return _prepared(schema, param, stay_open, closed, counts=counts)


def _prepared(
    schema: Schema, param: str, stay_open: set[int], closed: bool | None, *, counts: bool
) -> Schema:
    found: Schema = {}
    uncounted = () if counts or "properties" not in schema else _COUNTING

    def prepared(part: Schema) -> Schema:
        return _prepared(part, param, stay_open, closed, counts=counts)

    for name, value in schema.items():
        is_neutral = name in _NEUTRAL and value == _NEUTRAL[name] and type(value) is type(_NEUTRAL[name])
        if name == _OPTIONS or is_neutral or name in uncounted or _is_foreign(name, value):
            continue
        found[name] = _with_schemas(name, value, prepared)
    if closed is not False and id(schema) not in stay_open and _may_close(schema, always=bool(closed)):
        found.pop("unevaluatedProperties", None)
        found["additionalProperties"] = False
    _make_exact(found, param)
    return found


def escapes_for(prepared: Mapping[str, Any]) -> dict[str, str]:
    """llguidance's option for a schema with objects that name properties and may have others.

    Such a name could be written once more as another one, by an escape like \\u0061, with any value.
    """
    named = [each for each in _all_schemas(dict(prepared)) if any(map(each.get, _NAMING))]
    open = any(each.get("additionalProperties") is not False for each in named)
    return {"json_allowed_escapes": _ESCAPES} if open else {}


def _make_exact(schema: Schema, param: str) -> None:
    """Write what llguidance would understand a little differently so that no answer is wrong."""
    for name in REPEATING:
        if isinstance(count := schema.get(name), float) and count.is_integer():  # as 2.0, which is one
            schema[name] = int(count)
    schema.update(enforceable_bounds(schema, param))
    schema.update(bounds_left_out(schema))
    check_constants([schema.get("const"), schema.get("enum")], param)
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = for_json_string(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {for_json_string(name): each for name, each in patterns.items()}


def _with_schemas(keyword: str, value: object, change: Callable[[Schema], Schema]) -> object:
    """The value of a keyword, in which every schema is changed."""

    def changed(part: object) -> object:
        return change(part) if isinstance(part, dict) else part

    if isinstance(value, list) and (keyword in _OF_SCHEMAS or keyword == "items"):
        return [changed(each) for each in value]
    if isinstance(value, dict) and keyword in _BY_NAME:
        return {key: changed(each) for key, each in value.items()}
    return value if keyword in _NO_SCHEMAS else changed(value)


def _is_foreign(name: str, value: object) -> bool:
    """Whether a schema names another standard than the drafts of JSON Schema, of which nobody here knows."""
    return name == "$schema" and not (isinstance(value, str) and _DRAFTS in value)


def _may_close(schema: Schema, *, always: bool) -> bool:
    """Whether an object that has only the named properties is what a schema most likely means."""
    properties, others = schema.get("properties"), [name for name in _SAYS_OF_OTHERS if name in schema]
    if not isinstance(properties, dict):
        return always and schema.get("type") == "object" and not others
    required = schema.get("required")
    named = required if isinstance(required, list) else ()
    if not all(isinstance(name, str) and name in properties for name in named):
        return False
    return not others or (others == ["unevaluatedProperties"] and schema["unevaluatedProperties"] is False)


def _extended(root: Schema) -> set[int]:
    """The ids of schemas whose objects have properties that another schema names, for the same object.

    To close one of them would refuse the properties of the others.
    """
    found = set[int]()
    naming: dict[int, bool] = {}
    for schema in _all_schemas(root):
        named = sum(_parts_name_properties(schema, root, naming))
        if named + isinstance(schema.get("properties"), dict) > 1:
            _mark(schema, root, found)
    return found


def _mark(schema: Schema, root: Schema, found: set[int]) -> None:
    """Note a schema, and all that holds of the same value."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found.add(id(one))
            waiting += [each for part in _parts(one, root) for each in part]


def _parts(schema: Schema, root: Schema) -> list[list[Schema]]:
    """What holds of the same value beside the schema's own keywords: each a list of alternatives."""
    parts = [[each] for each in _schemas_in(schema.get("allOf"))]
    parts += [found for name in ("anyOf", "oneOf") if (found := _schemas_in(schema.get(name)))]
    conditional = [schema[name] for name in ("then", "else") if isinstance(schema.get(name), dict)]
    if conditional:
        parts.append(conditional)
    if (target := _resolve(schema.get("$ref"), root)) is not None:
        parts.append([target])
    return parts


def _parts_name_properties(schema: Schema, root: Schema, known: dict[int, bool]) -> list[bool]:
    """Say of each part of the schema whether an alternative of it names properties of the value itself."""
    return [any(_names_properties(each, root, known) for each in part) for part in _parts(schema, root)]


def _names_properties(schema: Schema, root: Schema, known: dict[int, bool]) -> bool:
    if id(schema) not in known:
        known[id(schema)] = isinstance(schema.get("properties"), dict)  # for schemas that refer to themselves
        known[id(schema)] = known[id(schema)] or any(_parts_name_properties(schema, root, known))
    return known[id(schema)]


def _schemas_in(value: object) -> list[Schema]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _all_schemas(root: Schema) -> Iterator[Schema]:
    """The schema and all in it."""
    waiting = [root]

    def wait(schema: Schema) -> Schema:
        waiting.append(schema)
        return schema

    while waiting:
        schema = waiting.pop()
        yield schema
        for name, value in schema.items():
            _with_schemas(name, value, wait)


def _check_references(root: Schema, param: str) -> None:
    for schema in _all_schemas(root):
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            target = schema.get(name)
            if target is not None and not (isinstance(target, str) and target.startswith("#")):
                raise BadRequest(
                    f"`{name}` of a schema must refer to a place in it, such as #/$defs/name: nothing is "
                    "fetched from elsewhere.",
                    param,
                )


def _resolve(reference: object, root: Schema) -> Schema | None:
    """The schema at a JSON pointer; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("%25", "%").replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = cast("Schema", place).get(name)
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return cast("Schema", place) if isinstance(place, dict) else None
