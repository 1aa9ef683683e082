"""Classes of characters in patterns of JSON strings, whose escapes they let through."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.grammars.json_schema import for_json_string
from server.grammars.response_format import AskedForm, StructuredOutputsParams, build_grammar


@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [
        (r'[^"\\]{1,6}', '"\\'),
        (r'[^"]', '"'),
        (r"x?[^\\\n]", "\\\n"),
        (r'[^"\n]|\n', '"'),
        (r"\P{P}", '"\\'),
        (r"[\P{P}]", '"\\'),
        (r"[\x00-!#-~]", '"'),
        (r'[[^"]&&[^a]]', '"a'),
        (r"[^a]", "a"),
    ],
)
def test_a_class_lets_no_escape_through_that_it_excludes(pattern: str, excluded: str) -> None:
    for name in (f"^({pattern})$", {f"^({pattern})$": {}}):
        schema = (
            {"type": "string", "pattern": name}
            if isinstance(name, str)
            else {"type": "object", "patternProperties": name, "additionalProperties": False}
        )
        built = build_grammar(AskedForm(StructuredOutputsParams(json=schema), "field", strict=True), {})
        start = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(built.text), log_level=0)
        for char in 'b"\\\n\t\x01':
            matcher = start.deep_copy()
            text = json.dumps(char) if isinstance(name, str) else "{" + json.dumps(char)
            assert all(map(matcher.consume_token, text.encode())) == (char not in excluded), (name, char)


@pytest.mark.parametrize("pattern", ["[a-z]+", "[]a]", r"\[^a]", "[^", "a]", r"[\]x]", "(?:[a]|.)*", "a\\"])
def test_what_holds_few_characters_stays_as_it_is(pattern: str) -> None:
    assert for_json_string(pattern) == pattern


def test_a_class_ends_where_it_does_for_the_engine() -> None:
    assert for_json_string(r"\[[^]a][^\]]x[[:alpha:]^-]") == r"\[[[^]a]--\x00][[^\]]--\x00]x[[:alpha:]^-]"
