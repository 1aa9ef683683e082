"""Bounds of numbers that the grammar engine does not keep: beyond 2^53, or whole and excluded."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.errors import BadRequest
from server.grammars.json_schema import EXACT, LARGEST, enforceable_bounds
from server.grammars.response_format import AskedForm, StructuredOutputsParams, build_grammar

EDGE = 25_000
"""The most numbers at a bound that are left out."""


def writes(schema: dict[str, Any], number: float) -> bool:
    built = build_grammar(AskedForm(StructuredOutputsParams(json=schema), "field", strict=True), {})
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(built.text), log_level=0)
    return all(map(matcher.consume_token, str(number).encode())) and matcher.is_accepting()


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("size", [EXACT, EXACT + 1, 10**18 - 1, 10**18 + 7, LARGEST - 10**6])
def test_no_number_beyond_a_bound_is_written(kind: str, size: int) -> None:
    for bound in (size, -size):
        for names, sign in (("maximum exclusiveMaximum", 1), ("minimum exclusiveMinimum", -1)):
            for excluded, name in enumerate(names.split()):
                schema = {"type": kind, name: bound}
                for beyond in (1 - excluded, 2 - excluded, 513, 10_001):
                    assert not writes(schema, bound + sign * beyond), (schema, beyond)
                assert writes(schema, bound - sign * EDGE), schema


def test_bounds_of_64_bits_are_kept_on_both_sides() -> None:
    for kind in ("integer", "number"):
        schema = {"type": kind, "minimum": -(2**63), "maximum": 2**64}
        assert writes(schema, LARGEST) and writes(schema, -LARGEST) and not writes(schema, -(2**63) - 1)


@pytest.mark.parametrize("whole", [0, 1, 7, 10**6])
def test_a_whole_bound_that_is_excluded_is_not_written_beside_a_near_one(whole: int) -> None:
    for far, most, least in ((0.5, "maximum", "minimum"), (0.25, "exclusiveMaximum", "exclusiveMinimum")):
        above = {"type": "number", "exclusiveMinimum": whole, most: whole + far}
        below = {"type": "number", "exclusiveMaximum": -whole, least: -whole - far}
        assert not writes(above, whole) and writes(above, whole + 0.125), above
        assert not writes(below, -whole) and writes(below, -whole - 0.125), below
    draft_4 = {"type": "number", "minimum": whole, "exclusiveMinimum": True, "maximum": whole + 0.5}
    assert not writes(draft_4, whole) and writes(draft_4, whole + 0.5)


def test_bounds_that_are_exact_or_no_numbers_stay() -> None:
    for schema in ({"minimum": -EXACT, "maximum": EXACT}, {"exclusiveMinimum": True, "maximum": "1e30"}):
        assert enforceable_bounds(schema, "field") == {}
    assert enforceable_bounds({"maximum": float("inf"), "minimum": float("nan")}, "field") == {}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"items": {"minimum": 2**63}}, f"`minimum` of a schema must be at most {LARGEST}"),
        ({"exclusiveMaximum": -1e19}, f"`exclusiveMaximum` of a schema must be at least -{LARGEST}"),
        ({"const": {"id": [EXACT + 1]}}, r"up to 2\^53, got 9007199254740993"),
        ({"properties": {"a": {"enum": ["a", -1e300]}}}, "Give them as strings"),
    ],
)
def test_numbers_that_cannot_be_kept_are_refused(schema: dict[str, Any], words: str) -> None:
    asked = AskedForm(StructuredOutputsParams(json=json.dumps(schema)), "field")
    with pytest.raises(BadRequest, match=words):
        build_grammar(asked, {})
