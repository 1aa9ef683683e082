"""The ways in which a request may ask for a form of its answer."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.grammars.form_grammar import AskedForm, StructuredOutputsParams
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest

SCHEMA = {"type": "object"}


def asked(**fields: Any) -> AskedForm | None:
    chat = ChatRequest(messages=[{"role": "user", "content": "a"}], **fields)  # pyright: ignore
    completion = CompletionRequest(prompt="a", **fields)  # pyright: ignore
    assert chat.asked_form() == completion.asked_form()
    return chat.asked_form()


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        asked(**fields)
    return error.value


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"regex": "a", "json_object": False}}, {"regex": "a", "json_object": False}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": "{}", "guided_decoding_backend": "xgrammar"}, {"json": "{}"}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "root ::= 1"}, {"grammar": "root ::= 1"}),
        ({"guided_json_object": True}, {"json_object": True}),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "_"},
            {"json": SCHEMA, "whitespace_pattern": "_"},
        ),
        ({"json_schema": "{}"}, {"json": "{}"}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"ebnf": "root ::= 1"}, {"grammar": "root ::= 1"}),
        ({"grammar": "root ::= 1"}, {"grammar": "root ::= 1"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
    ],
)
def test_each_way_to_say_it(fields: dict[str, Any], params: dict[str, Any]) -> None:
    assert asked(**fields) == AskedForm(StructuredOutputsParams(**params), next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "guided_json_object": False},
        {"guided_decoding_backend": "outlines"},
    ],
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_tags_in_a_response_format() -> None:
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    found = asked(response_format=tag)
    assert found is not None and found.params.structural_tag == tag


def test_strict() -> None:
    named = {"name": "x", "schema": SCHEMA, "strict": True}
    found = asked(response_format={"type": "json_schema", "json_schema": named})
    assert found is not None and found.strict


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "json"}, "an object with a `type`"),
        ({"response_format": {"type": "xml"}}, "is one of text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "needs `json_schema.schema`"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1.5}}},
            "strict",
        ),
        ({"structured_outputs": {}}, "You must use one kind"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "multiple are specified: regex, choice"),
        ({"structured_outputs": {"choice": "a"}}, "Expected `array"),
        ({"structured_outputs": {"xml": "a"}}, "unknown field"),
        ({"guided_choice": [1]}, "Expected `str`"),
        ({"guided_json_object": "yes"}, "is true or false"),
        ({"guided_regex": "a", "guided_whitespace_pattern": 1}, "is a text"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], words: str) -> None:
    error = refused(**fields)
    assert words in error.message and error.param in fields


def test_only_one_field_at_a_time() -> None:
    error = refused(guided_regex="a", response_format={"type": "json_object"})
    assert "multiple are specified: response_format, guided_regex" in error.message
