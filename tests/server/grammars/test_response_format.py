"""What is asked, as a grammar: which texts are in its language."""

import json
import re
from typing import Any

import pytest
from spelled import byte_spelling, follows, matcher_of

from server.errors import BadRequest
from server.grammars.response_format import AnswerGrammar, AskedForm, StructuredOutputsParams, build_grammar

CALL, END_CALL, END = 256, 257, 258
TOKENS = {"<call>": CALL, "</call>": END_CALL}
SPELLING = byte_spelling(*map(str.encode, TOKENS), b"<end>", special=3, ends=(END,))
SIZE = 259


def built(*, strict: bool = False, **params: Any) -> AnswerGrammar:
    return build_grammar(AskedForm(StructuredOutputsParams(**params), "field", strict), TOKENS)


def refusal(*, strict: bool = False, **params: Any) -> str:
    with pytest.raises(BadRequest) as raised:
        built(strict=strict, **params)
    assert raised.value.param == "field"
    return raised.value.message


def tokens_of(text: str) -> list[int]:
    tokens: list[int] = []
    while text:
        name = next((name for name in TOKENS if text.startswith(name)), None)
        tokens += [TOKENS[name]] if name else list(text[0].encode())
        text = text.removeprefix(name) if name else text[1:]
    return tokens


def accepts(found: AnswerGrammar, text: str, *, spelled: bool = False) -> bool:
    """Whether a text is in the language. `spelled`: with the names of special tokens as text."""
    matcher = matcher_of(found.for_engine(), SPELLING, SIZE)
    return follows(matcher, text.encode() if spelled else tokens_of(text), END)


def check(found: AnswerGrammar, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(found, text)] == []
    assert [text for text in wrong if accepts(found, text)] == []


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def test_json_follows_its_schema_and_objects_are_closed() -> None:
    right = ['{"name": "x"}', '{"name":"x","age":3}', '{\n  "name": "x"\n}']
    wrong = ["{}", '{"name": 3}', '{"name": "x", "more": 1}', ' {"name": "x"}', '{"name": "x"} ']
    check(built(json=PERSON), right, wrong)
    check(built(json=json.dumps(PERSON)), right, wrong)


def test_objects_are_open_if_json_schema_s_own_rule_is_asked_for() -> None:
    check(built(json=PERSON, disable_additional_properties=False), ['{"name": "x", "more": 1}'], ["{}"])


def test_no_name_of_an_open_object_comes_again_by_an_escape() -> None:
    named = {"properties": {"é": {"type": "integer"}}, "additionalProperties": True}
    right, wrong = ['{"é":1,"ü":"\\n"}'], [r'{"é":1,"\u00e9":"x"}', r'{"\u00e9":"x"}']
    check(built(json={"type": "object", **named}), right, wrong)
    by_pattern = {"type": "array", "items": {"patternProperties": {"^é": {"type": "integer"}}}}
    check(built(json=by_pattern), [f"[{text}]" for text in right], [f"[{text}]" for text in wrong])
    check(built(json=PERSON), [r'{"name": "\u001b[0m"}'], [])


def test_whitespace_is_bounded_or_none() -> None:
    spaces = '{{"name":{}"x"}}'
    check(built(json=PERSON), [spaces.format(" " * 20)], [spaces.format(" " * 21)])
    check(built(json=PERSON, disable_any_whitespace=True), [spaces.format("")], [spaces.format(" ")])
    check(built(json=PERSON, whitespace_pattern=""), [spaces.format("")], [spaces.format(" ")])
    check(built(json=PERSON, whitespace_pattern="_{0,2}"), [spaces.format("__")], [spaces.format(" ")])


def test_a_client_cannot_set_options_of_the_grammar_engine() -> None:
    schema = {**PERSON, "x-guidance": {"whitespace_flexible": False, "lenient": True}}
    check(built(json=schema), ['{"name": "x"}'], [])
    assert "x-guidance" in refusal(grammar='start: %json {"x-guidance": {"lenient": true}}')


def test_any_object() -> None:
    check(built(json_object=True), ['{"a": [1, {"b": null}]}', "{}"], ["[]", "3"])


def test_a_schema_that_allows_everything() -> None:
    check(built(json=True), ["3", '{"a": 1}', "[null]"], ["x"])


def test_a_regular_expression_matches_the_whole_answer() -> None:
    check(built(regex="[a-z]{2}/\\d+"), ["ab/12"], ["ab/", "xab/1", "ab/1x"])
    check(built(regex="^a|b$"), ["a", "b"], ["ab"])


def test_one_of_several_texts() -> None:
    check(built(choice=["yes", "no", 'a"b\\c\n', "Zoë"]), ["yes", 'a"b\\c\n', "Zoë"], ["ye", "yesno", ""])
    check(built(choice=["a", "ab", "a"]), ["a", "ab"], ["aa"])
    controls = ["".join(map(chr, range(32))), "\x7f\x80\u2028"]
    check(built(choice=controls), controls, ["\x7f"])


def test_grammars_in_ebnf_and_in_lark() -> None:
    ebnf = 'root ::= "SELECT " column ("," column)*  # a comment\ncolumn ::= [a-z]+ | "\\u00e9\\n"\n'
    check(built(grammar=ebnf), ["SELECT a,bc", "SELECT é\n"], ["SELECT", "SELECT A"])
    dots = 'root ::= "." [.] .*  # any.\n'
    check(built(grammar=dots), ["..", "..a\nb\u2028."], [".", ".a"])
    for written in ("[a&&b~~]+", "[b~a-a&&]+"):  # characters, which combine classes in an expression
        check(built(grammar=f"root ::= {written}"), ["a&b~"], ["-"])
    check(built(grammar="root ::= [+--]+"), ["+,-"], ["."])
    lark = 'start: "SELECT " column ("," column)*\ncolumn: /[a-z]+/\n'
    check(built(grammar=lark), ["SELECT a,bc"], ["SELECT"])


OLD_TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": PERSON, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def test_structural_tags_of_the_old_form() -> None:
    for tag in (OLD_TAG, json.dumps(OLD_TAG)):
        check(
            built(structural_tag=tag),
            ["only text <f", 'a <f=a>{"name": "x"}</f> b', "<f=b>12</f><f=b>3</f>"],
            ["<f=c>1</f>", "<f=b>x</f>", "a <f=b>1"],
        )


def a_format(**format: Any) -> AnswerGrammar:
    return built(structural_tag={"type": "structural_tag", "format": format})


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ({"type": "const_string", "value": "a/<b>"}, ["a/<b>"], ["a"]),
        ({"type": "regex", "pattern": "[ab]/"}, ["a/"], ["a"]),
        ({"type": "grammar", "grammar": 'root ::= "x"+'}, ["xx"], ["y"]),
        ({"type": "or", "elements": [INTEGER, {"type": "const_string", "value": "no"}]}, ["3", "no"], ["x"]),
        ({"type": "optional", "content": INTEGER}, ["", "3"], ["x"]),
        ({"type": "plus", "content": {"type": "const_string", "value": "x"}}, ["x", "xx"], [""]),
        ({"type": "star", "content": {"type": "const_string", "value": "x"}}, ["", "xx"], ["y"]),
        (
            {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "x"}},
            ["x", "xx"],
            ["", "xxx"],
        ),
        ({"type": "any_text", "excludes": ["no\n"]}, ["yes", "n\no"], ["yes no\n"]),
        (
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "</x>"]},
            ["<t>a < b</t>", "<t></x>"],
            ["<t>a", "<t></t></t>"],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "any_text"},
                    {"type": "tag", "begin": "#", "content": INTEGER, "end": "."},
                    {"type": "any_text"},
                ],
            },
            ["text #3. more", "#3."],
            ["text", "#x."],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [{"type": "tag", "begin": "[", "content": INTEGER, "end": "]"}],
                "separator": ", ",
            },
            ["", "[1]", "[1], [2]"],
            ["[1][2]", "[1], "],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<call>"],
                "tags": [{"begin": "<call>n=", "content": INTEGER, "end": "</call>"}],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<call>n=3</call>", "text <call>n=3</call>"],
            ["text", "<call>3</call>", "<call>n=3</call>more"],
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": ["<call>"],
                "tags": [{"begin": "<call>", "content": INTEGER, "end": "</call>"}],
            },
            ["text", "<call>3</call>more<call>4</call>"],
            ["<call>x"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "token", "token": "<call>"}, INTEGER]},
            ["<call>3"],
            ["3"],
        ),
        ({"type": "any_tokens", "exclude_tokens": ["<call>"]}, ["ab</call>"], ["a<call>"]),
    ],
)
def test_formats_of_structural_tags(format: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    check(a_format(**format), right, wrong)


def test_special_tokens_of_a_tag_are_tokens_and_not_their_text() -> None:
    found = a_format(type="tag", begin="<call>", content=INTEGER, end="</call>")
    assert accepts(found, "<call>3</call>")
    assert not accepts(found, "<call>3</call>", spelled=True)


def test_what_is_wrong_with_a_structural_tag_is_said() -> None:
    def told(**format: Any) -> str:
        return refusal(structural_tag={"type": "structural_tag", "format": format})

    assert "no support for the type 'dispatch'" in told(type="dispatch")
    assert "`value` of const_string is a text" in told(type="const_string", value=3)
    assert "'<no>' is not a special token" in told(type="token", token="<no>")
    assert "begins with one of the triggers" in told(
        type="triggered_tags", triggers=["<a"], tags=[{"begin": "<b", "content": INTEGER, "end": ""}]
    )
    assert "`style`" in told(type="json_schema", style="qwen_xml", json_schema={})
    assert "each format is an object" in refusal(structural_tag={"format": 3})
    assert "which is not JSON" in refusal(structural_tag="{")


# What cannot be enforced.

NOT_ENFORCED = [
    ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, ["not"]),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["uniqueItems"]),
    ({"type": "string", "format": "idn-email"}, ["format idn-email"]),
    ({"type": "string", "format": ""}, ["format"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
        ["minProperties or maxProperties"],
    ),
]


@pytest.mark.parametrize(("schema", "keywords"), NOT_ENFORCED)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], keywords: list[str]) -> None:
    assert built(json=schema).ignored == keywords
    told = refusal(json=schema, strict=True)
    assert told.startswith("`strict` is true, and ")
    assert all(f"`{keyword}`" in told for keyword in keywords)


def test_the_rest_of_such_a_schema_is_enforced() -> None:
    found = built(json={"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}})
    check(found, ['{"a": 3}'], ['{"a": "x"}', '{"b": 1}'])


def test_counts_may_have_a_fraction_of_zero() -> None:
    found = built(json={"items": {"type": "string", "maxLength": 2.0}, "minItems": 1.0}, strict=True)
    check(found, ['["ab"]'], ["[]", '["abc"]'])


def test_keywords_that_ask_for_nothing_are_not_named() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "minItems": 0}
    assert built(json=schema, strict=True).ignored == []


# What is refused.


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "You must use one kind of structured outputs constraint but none are specified"),
        ({"json_object": False}, "You must use one kind"),
        ({"regex": "a", "choice": ["b"]}, "You can only use one kind .*: regex, choice"),
        ({"json": "{"}, "which is not JSON"),
        ({"json": []}, "a JSON schema must be an object, got list"),
        ({"json": {"type": "number", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema: minimum"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"properties": {"a": {}}, "required": [["a"]]}}, "Expected string for 'required' item"),
        ({"json": {"type": "string", "minLength": "é" * 100}}, "its compiler crashes at it"),
        ({"json": {"$ref": "http://example.com/s.json"}}, "nothing is fetched from elsewhere"),
        ({"json": {"$ref": "#/$defs/x"}}, "does not exist"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"regex": ""}, "must not be empty"),
        ({"regex": "(a"}, "`regex` cannot be used: unclosed group"),
        ({"regex": "a{1,5000}"}, "repeat a part at most 4096 times"),
        ({"regex": "a" * 5000}, "at most 4096 characters"),
        ({"choice": []}, "must not be empty"),
        ({"choice": ["a", ""]}, "empty text"),
        ({"choice": ["a"] * 2000}, "at most 1024 texts"),
        ({"grammar": " "}, "must not be empty"),
        ({"grammar": "root ::= foo"}, "not EBNF: Rule 'foo' not found"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "root ::= " + "(" * 30_000}, "EBNF|nested too deep"),
        ({"grammar": "start: " + "x" * 70_000}, "at most 65536 characters"),
        ({"json": nested(300)}, "nested 32 deep"),
        ({"json": {"properties": {f"p{n}": {} for n in range(5000)}}}, "at most 1000 properties"),
        ({"json": {"minItems": 10**9}}, "`minItems` of a schema may be at most 4096"),
        ({"json": {"type": "string", "maxLength": 10**6}}, "`maxLength`"),
        ({"json": {"enum": [f"value {number}" for number in range(100_000)]}}, "at most 65536 characters"),
        ({"json": {"type": "string", "pattern": "a" * 5000}}, "at most 4096 characters"),
    ],
)
def test_what_cannot_be_used_is_refused(params: dict[str, Any], reason: str) -> None:
    told = refusal(**params)
    assert re.search(reason, told), told
    assert "\n" not in told


def test_a_long_chain_of_references_is_read_in_linear_time() -> None:
    definitions = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {}]} for n in range(900)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d900": PERSON}}
    told = refusal(json=schema)
    assert told
