"""Objects that are closed, and what is dropped from a schema."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.grammars.json_schema import prepare_schema


def prepared(schema: dict[str, Any], *, closed: bool | None = None) -> dict[str, Any]:
    return prepare_schema(schema, "field", closed=closed)


def is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}


def test_an_object_that_names_properties_is_closed_wherever_it_is() -> None:
    schema = {
        "properties": {"inner": A, "list": {"items": A}, "pair": {"prefixItems": [A], "items": [A]}},
        "$defs": {"d": A},
        "anyOf": [{"type": "object"}],
    }
    found = prepared(schema)
    assert is_closed(found)
    inner = found["properties"]
    every = [
        inner["inner"],
        inner["list"]["items"],
        inner["pair"]["prefixItems"][0],
        inner["pair"]["items"][0],
    ]
    assert all(map(is_closed, [*every, found["$defs"]["d"]]))


def test_schemas_lie_where_references_find_them_but_not_in_values() -> None:
    found = prepared({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": A}}})
    assert is_closed(found["components"]["schemas"]["a"])
    assert found["$ref"] == "#/components/schemas/a" and found["components"].keys() == {"schemas"}
    for keyword in ("const", "default", "example"):
        assert prepared({keyword: A}) == {keyword: A}


def test_an_object_that_says_something_of_other_properties_stays_as_it_is() -> None:
    for more in (
        {"additionalProperties": True},
        {"patternProperties": {"^x": {}}},
        {"additionalProperties": {}},
    ):
        assert not is_closed(prepared({**A, **more}))
    assert prepared({**A, "unevaluatedProperties": False}) == {**A, "additionalProperties": False}
    assert not is_closed(prepared({**A, "required": ["other"]}))
    assert not is_closed(prepared({"type": "object"}))


def test_what_is_asked_for_goes_before_that() -> None:
    assert not is_closed(prepared(A, closed=False))
    assert is_closed(prepared({"type": "object"}, closed=True))


def test_objects_that_several_schemas_describe_together_stay_open() -> None:
    both = prepared({"allOf": [A, B]})
    assert not any(map(is_closed, [both, *both["allOf"]]))
    extended = prepared({"allOf": [{"$ref": "#/$defs/base"}], **B, "$defs": {"base": A, "other": {**A}}})
    assert not is_closed(extended) and not is_closed(extended["$defs"]["base"])
    assert is_closed(extended["$defs"]["other"])


def test_one_description_beside_others_that_name_no_properties_is_closed() -> None:
    assert is_closed(prepared({**A, "anyOf": [{"required": ["a"]}, {"required": []}]}))
    assert is_closed(prepared({"allOf": [A, {"required": ["a"]}]})["allOf"][0])
    either = prepared({"anyOf": [A, B]})
    assert all(map(is_closed, either["anyOf"]))


def test_schemas_that_refer_to_themselves_are_read() -> None:
    tree = {"properties": {"left": {"$ref": "#"}}}
    assert is_closed(prepared(tree))
    loop = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}, A]}},
    }
    assert prepared(loop)["$defs"]["a"] == {"$ref": "#/$defs/b"}


def test_values_that_look_like_schemas_are_left_alone() -> None:
    data = {"properties": {"x": 1}, "x-guidance": {}, "uniqueItems": False}
    schema = {"const": data, "enum": [data], "default": data, "examples": [data]}
    assert prepared(schema) == schema


def test_options_of_the_grammar_engine_and_neutral_keywords_are_dropped() -> None:
    schema = {
        "items": {"x-guidance": {"lenient": True}},
        "x-guidance": {},
        "uniqueItems": False,
        "minItems": 0,
    }
    assert prepared(schema) == {"items": {}}
    assert prepared({"uniqueItems": True, "minItems": 1}) == {"uniqueItems": True, "minItems": 1}


def test_an_unknown_standard_is_not_looked_for() -> None:
    known = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    assert prepared(known) == known
    assert prepared({"$schema": "my own", "type": "null"}) == {"type": "null"}


def test_nothing_is_fetched_from_elsewhere() -> None:
    for reference in ("other.json", "https://example.com/s", 3):
        with pytest.raises(BadRequest, match="must refer to a place in it"):
            prepared({"items": {"$ref": reference}})
    assert prepared({"const": {"$ref": "https://example.com"}})


def test_pointers_are_followed_with_their_escapes() -> None:
    schema = {"allOf": [{"$ref": "#/$defs/a~1b%25c"}, {"$ref": "#/$defs/list/prefixItems/0"}]}
    definitions = {"a/b%c": A, "list": {"prefixItems": [B]}}
    found = prepared({**schema, "$defs": definitions})["$defs"]
    assert not is_closed(found["a/b%c"]) and not is_closed(found["list"]["prefixItems"][0])
