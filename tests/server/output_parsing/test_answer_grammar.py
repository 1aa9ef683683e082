"""What a dialect's grammar allows, its reader reads, and the arguments are those of the tool's schema."""

import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from answers import Answer, read
from family_templates import TEMPLATES, family_tokenizer
from grammar_walks import Vocabulary, accepts, walk
from probed_families import BY_ID, REQUIRED, written_for

from server.grammars.response_format import AnswerGrammar
from server.output_parsing.answer_format import (
    AnswerFormat,
    AnswerWriter,
    behind_thinking,
    format_with,
    with_marks,
)
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.dialect import ThinkingMarkers
from server.output_parsing.format_detection import find_format
from server.output_parsing.formats.call_format import ANY_OBJECT, ToolForm, Unenforceable
from server.output_parsing.tool_call_dialects import (
    DIALECTS,
    DIALECTS_BY_NAME,
    THINKING_BY_NAME,
)
from server.text.detokenizer import FIRST_MARK

SPECIAL = re.compile(
    r"<\|[^|>]*\|>|<｜[^｜>]*｜>|｜DSML｜|</?(?:seed:|minimax:|start_|end_)?(?:tool_call|function_call)>"
    r'|\[[A-Z_]{3,}\]|<\|"\|>|<\|tool_call>|<tool_call\|>|<escape>|<TOOLCALL>|</?think>'
)
"""The markers that are special tokens in the vocabularies of their families."""

NO_ARGUMENTS = ToolForm("f", {"type": "object", "properties": {}, "additionalProperties": False})


@cache
def vocabulary_of(name: str, special: bool) -> Vocabulary:
    literals = repr((DIALECTS_BY_NAME[name], THINKING_BY_NAME["think"], THINKING_BY_NAME["openai_gptoss"]))
    return Vocabulary(sorted({*SPECIAL.findall(literals)}, key=len, reverse=True) if special else ())


def format_of(name: str, *, special: bool = True, thinking: ThinkingMarkers | None = None) -> AnswerFormat:
    dialect, vocabulary = DIALECTS_BY_NAME[name], vocabulary_of(name, special)
    marks = {text: chr(FIRST_MARK + number) for number, text in enumerate(vocabulary.specials.values())}
    return AnswerFormat(
        with_marks(dialect, marks),
        thinking and with_marks(thinking, marks),
        {id: marks[text] for id, text in vocabulary.specials.items()},
        {mark: text for text, mark in marks.items()},
        (),
        with_marks(dialect.opens[0], marks),
    )


def random_schema(seed: random.Random, depth: int) -> dict[str, Any]:
    simple = ["string", "string", "integer", "boolean"]
    match seed.choice(
        simple if depth > 1 else [*simple, "number", "enum", "array", "object", "or", "ref", "short"]
    ):
        case "enum":
            return seed.choice([{"enum": ["red", "gr een"]}, {"type": "string", "enum": ["a", 'b"c']}])
        case "array":
            return {"type": "array", "items": random_schema(seed, depth + 1)}
        case "object":
            return random_object(seed, depth + 1)
        case "or":
            return {"anyOf": [{"type": "string"}, {"type": "null"}]}
        case "ref":
            return {"$ref": "#/$defs/count"}
        case "short":
            return {"type": "string", "minLength": 1, "maxLength": 9}
        case kind:
            return {"type": kind}


def random_object(seed: random.Random, depth: int = 0) -> dict[str, Any]:
    names = seed.sample(["a", "b", "city", "unit_x", "n1"], seed.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(seed, depth) for name in names},
        "required": [name for name in names if seed.random() < 0.6],
        "additionalProperties": False,
    }


def random_tools(seed: random.Random) -> list[ToolForm]:
    definitions = {"count": {"type": "integer"}}
    return [ToolForm(name, {**random_object(seed), "$defs": definitions}) for name in ("f", "get_it")]


def read_back(format: AnswerFormat, tools: list[ToolForm], text: str) -> Answer:
    schemas = {tool.name: tool.schema for tool in tools}
    reader = AnswerReader(format.dialect, format.thinking, tools=schemas, written=format.written)
    answer = read(reader, text)
    for name, arguments in answer.calls:
        jsonschema.validate(json.loads(arguments), schemas[name])
    assert answer.ended == len(answer.calls)
    return answer


@pytest.mark.turns(4)
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "text"])
@pytest.mark.parametrize("name", [each.name for each in DIALECTS])
def test_what_the_grammar_allows_is_read_back(name: str, special: bool) -> None:
    format, vocabulary = format_of(name, special=special), vocabulary_of(name, special)
    for number in range(6 if special else 3):
        seed = random.Random(f"{name} {number}")
        tools, several = random_tools(seed), bool(number % 2)
        written = AnswerWriter(format, tools, several=several, is_thinking=False).required()
        assert not written.wakes and not written.ignored
        ids = walk(vocabulary, written.text, seed)
        if ids is None:  # a random string seldom ends by itself
            continue
        answer = read_back(format, tools, vocabulary.text(ids, dict(format.marks)))
        assert answer.calls and (several or len(answer.calls) == 1) and not answer.text.strip()


CLOSED = {"additionalProperties": False}
OBJECT = AnswerGrammar("json", json.dumps({"type": "object", "properties": {"name": {"type": "string"}}}))


@pytest.mark.turns(2)
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "text"])
@pytest.mark.parametrize("name", [each.name for each in DIALECTS if each.opens[0] != "{"])
def test_calls_or_an_answer_of_a_form(name: str, special: bool) -> None:
    format, vocabulary = format_of(name, special=special), vocabulary_of(name, special)
    calls = AnswerWriter(format, [NO_ARGUMENTS], several=False, is_thinking=False).required().text
    either = behind_thinking(OBJECT, format, AnswerGrammar("lark", calls)).text
    call = next(ids for number in range(99) if (ids := walk(vocabulary, calls, random.Random(number))))
    assert read_back(format, [NO_ARGUMENTS], vocabulary.text(call, dict(format.marks))).calls
    assert accepts(vocabulary, either, call)
    assert accepts(vocabulary, either, ['{"name": "f"}']) and accepts(vocabulary, either, ["{}"])
    assert not accepts(vocabulary, either, ["{}", *call]) and not accepts(vocabulary, either, ["no"])


CITY = ToolForm("f", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
CALL = '{"name": "f", "arguments": {"city": "x"}}'


def hermes(**thinking: Any) -> tuple[AnswerFormat, Vocabulary, dict[str, int]]:
    format = format_of("hermes", **thinking)
    vocabulary = vocabulary_of("hermes", thinking.get("special", True))
    return format, vocabulary, {name: id for id, name in vocabulary.specials.items()}


def grammar_of(written: AnswerGrammar, *, wakes: list[int], again: bool = False) -> str:
    assert (written.wakes, written.again) == (tuple((wake,) for wake in wakes), again)
    return written.text


def test_reasoning_may_come_before_a_required_call() -> None:
    format, vocabulary, token = hermes(thinking=THINKING_BY_NAME["think"])
    opens, closes, call, end = (
        token[name] for name in ("<think>", "</think>", "<tool_call>", "</tool_call>")
    )
    written = AnswerWriter(format, [CITY], several=False, is_thinking=False).required()
    grammar = grammar_of(written, wakes=[])
    assert accepts(vocabulary, grammar, [opens, "so\n", closes, "\n\n", call, "\n" + CALL + "\n", end])
    assert accepts(vocabulary, grammar, [call, CALL, end])
    assert not accepts(vocabulary, grammar, ["so", call, CALL, end])
    assert not accepts(vocabulary, grammar, [opens, "so", closes, "no"])
    assert not accepts(vocabulary, grammar, [call, CALL, end, call, CALL, end])


def test_a_grammar_sleeps_while_the_model_thinks() -> None:
    format, vocabulary, token = hermes(thinking=THINKING_BY_NAME["think"])
    written = AnswerWriter(format, [CITY], several=True, is_thinking=True).required()
    grammar = grammar_of(written, wakes=[token["</think>"]])
    call = [token["<tool_call>"], CALL, token["</tool_call>"]]
    assert accepts(vocabulary, grammar, ["\n\n", *call, "\n", *call])


def test_without_special_tokens_the_grammar_follows_the_thinking() -> None:
    format, vocabulary, _ = hermes(special=False, thinking=THINKING_BY_NAME["think"])
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    for is_thinking, text in (
        (True, f"so</think>\n{call}"),
        (False, f"<think>so</think>{call}"),
        (False, call),
    ):
        written = AnswerWriter(format, [CITY], several=False, is_thinking=is_thinking).required()
        assert accepts(vocabulary, grammar_of(written, wakes=[]), [text])
    assert not accepts(vocabulary, written.text, [f"so {call}"])


def test_text_is_free_until_a_special_token_opens_a_call() -> None:
    format, vocabulary, token = hermes()
    for several in (True, False):
        written = AnswerWriter(format, [CITY], several=several, is_thinking=False).possible()
        grammar = grammar_of(written, wakes=[token["<tool_call>"]], again=several)
        assert accepts(vocabulary, grammar, ["\n" + CALL + "\n", token["</tool_call>"]])
        assert not accepts(vocabulary, grammar, [CALL.replace('"x"', "1"), token["</tool_call>"]])


@pytest.mark.parametrize(
    ("name", "call"),
    [("hermes", f"<tool_call>{CALL}</tool_call>"), ("llama3_json", CALL.replace("arguments", "parameters"))],
)
def test_without_special_tokens_the_grammar_follows_the_text(name: str, call: str) -> None:
    format, vocabulary = format_of(name, special=False), vocabulary_of(name, False)
    written = AnswerWriter(format, [CITY], several=True, is_thinking=False).possible()
    grammar = grammar_of(written, wakes=[])
    assert accepts(vocabulary, grammar, ["I do not <know> {it}."])
    assert accepts(vocabulary, grammar, [call])
    assert not accepts(vocabulary, grammar, [call.replace('"x"', "1")])


def test_gpt_oss_thinks_in_a_channel_before_it_calls() -> None:
    format = format_of("openai", thinking=THINKING_BY_NAME["openai_gptoss"])
    vocabulary = vocabulary_of("openai", True)
    token = {name: id for id, name in vocabulary.specials.items()}
    channel, message, end, start = (token[f"<|{name}|>"] for name in ("channel", "message", "end", "start"))
    writer = AnswerWriter(format, [CITY], several=True, is_thinking=False)
    call = [channel, "commentary to=functions.f ", token["<|constrain|>"], "json", message, '{"city": "x"}']
    thought = [channel, "analysis", message, "so", end, start, "assistant"]
    grammar = writer.required().text
    assert accepts(vocabulary, grammar, call) and accepts(vocabulary, grammar, [*thought, *call])
    assert not accepts(vocabulary, grammar, thought)
    with pytest.raises(Unenforceable):
        writer.possible()


def test_gpt_oss_answers_a_form_in_its_final_channel_or_calls() -> None:
    thinking = THINKING_BY_NAME["openai_gptoss"]
    format, vocabulary = format_of("openai", thinking=thinking), vocabulary_of("openai", True)
    token = {name: id for id, name in vocabulary.specials.items()}
    channel, message, end, start = (token[f"<|{name}|>"] for name in ("channel", "message", "end", "start"))
    alone = replace(format, thinking=None)
    calls = AnswerWriter(alone, [CITY], several=True, is_thinking=False).required().text
    grammar = behind_thinking(OBJECT, format, AnswerGrammar("lark", calls)).text
    thought = [channel, "analysis", message, "so", end, start, "assistant"]
    called = [channel, "commentary to=functions.f ", token["<|constrain|>"], "json", message, '{"city": "x"}']
    answer = [channel, "final", message, '{"name": "x"}']
    for text in (answer, called, [*thought, *answer], [*thought, *called]):
        assert accepts(vocabulary, grammar, text)
    remark = [channel, "commentary", message, "I look.", end, start, "assistant"]
    free, wrong = [channel, "final", message, "no"], [*called[:-1], '{"city": 1}']
    for text in (free, wrong, thought, [*remark, *answer], [*answer, *called], ['{"name": "x"}']):
        assert not accepts(vocabulary, grammar, text)
    called_at_all: set[bool] = set()
    for number in range(30):
        if (ids := walk(vocabulary, grammar, random.Random(number))) is not None:
            read = read_back(format, [CITY], vocabulary.text(ids, dict(format.marks)))
            called_at_all.add(bool(read.calls))
            if not read.calls:
                jsonschema.validate(json.loads(read.text), json.loads(OBJECT.text))
    assert called_at_all == {True, False}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_required_call_may_be_written_as_the_template_writes_it(family: str) -> None:
    found, template = find_format(family_tokenizer(family)), TEMPLATES[family]
    assert found.dialect
    vocabulary = Vocabulary([*found.written.values()])
    ids = {name: id for id, name in vocabulary.specials.items()}
    thinking = THINKING_BY_NAME[found.thinking.name] if found.thinking else None
    opener = found.as_written(found.opener)
    format = format_with(DIALECTS_BY_NAME[found.dialect.name], thinking, ids, opener)
    is_thinking = format.begins_thinking(template.head + template.opens)
    for scenario in (REQUIRED, *map(BY_ID.__getitem__, ("nested-args", "unicode-args", "empty-args"))):
        functions = (tool["function"] for tool in scenario.tools)
        tools = [ToolForm(each["name"], {**each["parameters"], **CLOSED}) for each in functions]
        required = AnswerWriter(format, tools, several=True, is_thinking=is_thinking).required()
        written = written_for(scenario, family).removesuffix("<|close|>message<|sep|>")  # behind the calls
        pieces = re.split(f"({'|'.join(map(re.escape, ids))})", written)
        text = [ids.get(piece, piece) for piece in pieces]
        for [token] in required.wakes:
            text = text[text.index(token) + 1 :]
        assert accepts(vocabulary, required.text, text), scenario.id


@pytest.mark.parametrize("name", [each.name for each in DIALECTS])
def test_arguments_may_be_left_free(name: str) -> None:
    format, vocabulary = format_of(name), vocabulary_of(name, True)
    tools, seed = [ToolForm("f", ANY_OBJECT)], random.Random(name)
    written = AnswerWriter(format, tools, several=False, is_thinking=False).required()
    ids = walk(vocabulary, written.text, seed)
    if ids is not None:
        schemas = {"f": {}}
        reader = AnswerReader(format.dialect, None, tools=schemas, written=format.written)
        assert [name for name, _ in read(reader, vocabulary.text(ids, dict(format.marks))).calls] == ["f"]


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": "string", "format": "date"}, "format"),
        ({"$ref": "#/properties/other"}, "$ref"),
    ],
)
def test_what_cannot_be_enforced_is_told_or_refused(schema: dict[str, Any], keyword: str) -> None:
    format = format_of("qwen3_coder")
    for strict in (False, True):
        tool = ToolForm(
            "f", {"type": "object", "properties": {"x": schema, "other": {"type": "object"}}}, strict
        )
        writer = AnswerWriter(format, [tool], several=False, is_thinking=False)
        if strict:
            with pytest.raises(Unenforceable) as refused:
                writer.required()
            assert refused.value.keyword == keyword
        else:
            assert writer.required().ignored == [f"f: {keyword}"]
