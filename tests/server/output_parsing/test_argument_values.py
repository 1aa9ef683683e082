"""Values of arguments, which are JSON whatever the model writes, and of the types of the tool's schema."""

import json
import random

import pytest
from answers import TOOLS, read
from pydantic_core import from_json

from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.tool_call_dialects import DIALECTS_BY_NAME

HERMES = DIALECTS_BY_NAME["hermes"]
M3 = "]<]minimax[>["


def arguments_of(written: str, seed: int) -> str:
    """The arguments of a call of Hermes' form, of which the model writes this."""
    text = f'<tool_call>{{"name": "stop", "arguments": {written}}}</tool_call>'
    ((_, arguments),) = read(AnswerReader(HERMES, None, tools=TOOLS), text, random.Random(seed)).calls
    return arguments


def test_elements_become_values_of_the_schemas_types() -> None:
    schema = {
        "properties": {
            "zip": {"type": "string"},
            "at": {"$ref": "#/$defs/at"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "none": {"type": "array"},
            "empty": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"at": {"properties": {"x": {"type": "integer"}, "name": {"type": "string"}}}},
    }
    written = (
        f'{M3}<tool_call>\n{M3}<invoke name="f">{M3}<zip>0 {M3}</zip>{M3}<at>{M3}<x>1{M3}</x>{M3}<name>2{M3}</name>{M3}</at>'
        f"{M3}<tags>{M3}<item>3{M3}</item>{M3}</tags>{M3}<none>{M3}</none>{M3}<empty>{M3}</empty>{M3}</invoke>\n{M3}</tool_call>"
    )
    found = read(AnswerReader(DIALECTS_BY_NAME["minimax_m3"], None, tools={"f": schema}), written)
    [(_, arguments)] = found.calls
    values = {"zip": "0 ", "at": {"x": 1, "name": "2"}, "tags": ["3"], "none": [], "empty": ""}
    assert json.loads(arguments) == values


def test_a_value_that_may_be_null_has_the_types_of_its_other_form() -> None:
    place = {"type": "object", "properties": {"zip": {"type": "string"}}}
    schema = {"properties": {"at": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}}}
    text = f"{M3}<at>{M3}<zip>12345{M3}</zip>{M3}</at>{M3}</invoke>{M3}</tool_call>"
    tools = {"f": {**schema, "$defs": {"place": place}}}
    reader = AnswerReader(DIALECTS_BY_NAME["minimax_m3"], None, tools=tools)
    (call,) = read(reader, f'{M3}<tool_call>{M3}<invoke name="f">{text}').calls
    assert json.loads(call[1]) == {"at": {"zip": "12345"}}


def test_elements_of_one_name_within_an_object_are_a_list() -> None:
    inner = f"{M3}<tag>a{M3}</tag>{M3}<size>1{M3}</size>{M3}<tag>b{M3}</tag>"
    text = f'{M3}<tool_call>{M3}<invoke name="get_weather">{M3}<flags>{inner}{M3}</flags>{M3}</invoke>{M3}</tool_call>'
    (call,) = read(AnswerReader(DIALECTS_BY_NAME["minimax_m3"], None, tools=TOOLS), text).calls
    assert json.loads(call[1]) == {"flags": {"tag": ["a", "b"], "size": 1}}


def test_an_object_may_be_written_as_python_where_the_schema_has_no_string() -> None:
    text = "<function=get_weather><parameter=flags>{'a': [True, None]}</parameter></function></tool_call>"
    reader = AnswerReader(DIALECTS_BY_NAME["qwen3_coder"], None, tools=TOOLS)
    assert read(reader, text).calls == [("get_weather", '{"flags": {"a": [true, null]}}')]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[f(day=07, zip=07302)]"),
        (
            "qwen3_coder",
            "<function=f><parameter=day>07</parameter><parameter=zip>07302</parameter></function></tool_call>",
        ),
    ],
)
def test_integers_may_begin_with_zeros(name: str, text: str) -> None:
    tools = {"f": {"properties": {"day": {"type": "integer"}, "zip": {"type": "string"}}}}
    (call,) = read(AnswerReader(DIALECTS_BY_NAME[name], None, tools=tools), text).calls
    assert json.loads(call[1]) == {"day": 7, "zip": "07302"}


def test_a_schema_that_leads_back_to_itself_in_many_ways_is_read_once() -> None:
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 100 + [{"type": "string"}]}}}
    reader = AnswerReader(DIALECTS_BY_NAME["qwen3_coder"], None, tools={"f": schema})
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert read(reader, text).calls == [("f", '{"a": "1"}')]


def test_elements_may_not_be_nested_for_ever() -> None:
    written = f'{M3}<tool_call>{M3}<invoke name="get_weather">' + f"{M3}<days>" * 50_000
    found = read(AnswerReader(DIALECTS_BY_NAME["minimax_m3"], None, tools=TOOLS), written)
    assert (found.text, found.calls) == ("", [])


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[NaN]", '"half \\ud83d"'])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[stop(x=%s)]"),
        ("gemma4", "<|tool_call>call:stop{x:%s}<tool_call|>"),
        ("qwen3_coder", "<function=stop><parameter=x>%s</parameter></function></tool_call>"),
        (
            "minimax_m3",
            f'{M3}<tool_call>{M3}<invoke name="stop">{M3}<x>%s{M3}</x>{M3}</invoke>{M3}</tool_call>',
        ),
    ],
)
def test_arguments_are_json_that_can_be_sent(name: str, text: str, value: str) -> None:
    (call,) = read(AnswerReader(DIALECTS_BY_NAME[name], None, tools=TOOLS), text % value).calls
    assert from_json(call[1].encode(), allow_inf_nan=False)["x"]


@pytest.mark.parametrize("seed", range(5))
def test_line_ends_within_strings_are_escaped(seed: int) -> None:
    inner = '{"a": ["x\n\ty"],\n "b\\"\r": {}}'
    for written in (inner, json.dumps(inner)):
        assert json.loads(arguments_of(written, seed)) == {"a": ["x\n\ty"], 'b"\r': {}}


@pytest.mark.parametrize("seed", range(5))
def test_backslashes_that_begin_no_escape_stand_for_themselves(seed: int) -> None:
    written = r"""{"a": "\d+\.\"\\\u0041", "b": "it\'s \
"}"""
    assert json.loads(arguments_of(written, seed)) == {"a": r"\d+\." + '"\\A', "b": "it\\'s \\\n"}


@pytest.mark.parametrize("seed", range(5))
def test_json_may_be_spelled_as_in_python(seed: int) -> None:
    value = {"a": ['it\'s "True"', None, False, True], "b": {"c\n'": "None"}}
    for written in (repr(value), json.dumps(repr(value)), repr(json.dumps(value))):
        assert json.loads(arguments_of(written, seed)) == value
    whole = f"<tool_call>{ {'name': 'stop', 'arguments': value} }</tool_call>"
    ((name, arguments),) = read(AnswerReader(HERMES, None, tools=TOOLS), whole, random.Random(seed)).calls
    assert (name, json.loads(arguments)) == ("stop", value)


@pytest.mark.parametrize("value", ["'a\n\"b\"'", '"a\n\\"b\\""'])
def test_strings_of_python_and_of_json_between_tags_may_have_line_ends(value: str) -> None:
    tags = "<function=get_weather><parameter=flags>[%s]</parameter></function></tool_call>"
    for name, text in (("pythonic", "[get_weather(flags=[%s])]"), ("qwen3_coder", tags)):
        (call,) = read(AnswerReader(DIALECTS_BY_NAME[name], None, tools=TOOLS), text % value).calls
        assert json.loads(call[1]) == {"flags": ['a\n"b"']}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': [true, {'b': null}], 'c': False}", {"a": [True, {"b": None}], "c": False}),
        ("{'x', 'y'}", ["x", "y"]),
        ("[(1, -2.5), ('a' 'b',)]", [[1, -2.5], ["ab"]]),
    ],
)
def test_literals_of_python_may_have_names_of_json_and_sets(text: str, value: object) -> None:
    (call,) = read(AnswerReader(DIALECTS_BY_NAME["pythonic"], None, tools=TOOLS), f"[stop(x={text})]").calls
    assert json.loads(call[1]) == {"x": value}


def test_half_a_character_within_quoted_arguments_can_be_sent() -> None:
    assert arguments_of(r'"{\"x\": \"half \ud83d\"}"', 0) == '{"x": "half \ufffd"}'


@pytest.mark.parametrize("text", ["all", 'a "b" \n', '{"x": 1', "{'x': 1"])
def test_quoted_arguments_that_are_no_json_are_a_string(text: str) -> None:
    call = json.dumps({"name": "stop", "arguments": text})
    for holds in (True, False):
        reader = AnswerReader(HERMES, None, tools=TOOLS, holds_calls=holds)
        ((_, arguments),) = read(reader, f"<tool_call>{call}</tool_call>", random.Random(0)).calls
        assert json.loads(arguments) == text
