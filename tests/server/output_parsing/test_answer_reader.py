"""What an answer is made of: reasoning, text and calls, and text that only looks like them."""

import json
import random
from itertools import pairwise

import pytest
from answers import TOOLS, Answer, read
from hypothesis import given
from hypothesis import strategies as st
from spelled import demo_tokenizer
from untimed import untimed

from server.output_parsing.answer_format import format_with
from server.output_parsing.answer_reader import AnswerReader, CustomToolInput
from server.output_parsing.tool_call_dialects import (
    DIALECTS_BY_NAME,
    THINKING,
    THINKING_BY_NAME,
    dialect_named,
)

HERMES, THINK = DIALECTS_BY_NAME["hermes"], THINKING[0]
STOP = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'


def answer(text: str, *, is_thinking: bool = False, calls: bool = True, seed: int = 0) -> Answer:
    reader = AnswerReader(HERMES, THINK, tools=TOOLS if calls else None, is_thinking=is_thinking)
    return read(reader, text, random.Random(seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("text", "reasoning", "shown"),
    [
        ("plain", "", "plain"),
        ("  kept \n", "", "  kept \n"),
        ("<think>a</think>b", "a", "b"),
        ("<think>\n\na\n\n</think>\n\nb\n", "a", "b\n"),
        ("<think></think>b", "", "b"),
        ("</think>\n\nb", "", "b"),
        ("\n </think>b</think>", "", "b</think>"),
        ("</thinking", "", "</thinking"),
        ("<think>never ends <", "never ends <", ""),
        ("a < b </think> c", "", "a < b </think> c"),
        ("x <thin", "", "x <thin"),
    ],
)
def test_reasoning_and_text(text: str, reasoning: str, shown: str, seed: int) -> None:
    found = answer(text, seed=seed)
    assert (found.reasoning, found.text, found.calls) == (reasoning, shown, [])


@pytest.mark.parametrize("again", ["", "<think>\n", "\n<think>"])
def test_a_prompt_may_have_opened_the_reasoning(again: str) -> None:
    for seed in range(3):
        found = answer(f"{again}so <think>\n</think>\n\nyes", is_thinking=True, seed=seed)
        assert (found.reasoning, found.text) == ("so <think>", "yes")


@pytest.mark.parametrize("seed", range(3))
def test_reasoning_may_stay_in_the_text_with_its_markers(seed: int) -> None:
    for is_thinking, text in ((True, "so\n</think>\n\n4"), (False, "<think>so\n</think>\n\n4"), (True, "so")):
        markers = THINKING_BY_NAME["minimax_m2_append_think"]
        reader = AnswerReader(DIALECTS_BY_NAME["minimax_m2"], markers, tools=TOOLS, is_thinking=is_thinking)
        found = read(reader, text, random.Random(seed))
        assert (found.reasoning, found.text) == ("", "<think>" + text.removeprefix("<think>"))


@pytest.mark.parametrize("seed", range(3))
def test_cohere_answers_in_a_text_or_calls(seed: int) -> None:
    call = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "stop", "parameters": {}}]<|END_ACTION|>'
    for answer, text in ((call, ""), ("<|START_TEXT|>Four.<|END_TEXT|>", "Four.")):
        dialect, markers = dialect_named("cohere_command4"), THINKING_BY_NAME["cohere_command4"]
        reader = AnswerReader(dialect, markers, tools=TOOLS, is_thinking=True)
        found = read(reader, f"so<|END_THINKING|>{answer}", random.Random(seed))
        assert (found.reasoning, found.text, len(found.calls)) == ("so", text, int(not text))


@pytest.mark.parametrize("name", ["hunyuan_a13b", "ernie45", "cohere_command3"])
@pytest.mark.parametrize("seed", range(3))
def test_markup_around_the_text_of_an_answer_is_no_text(name: str, seed: int) -> None:
    markers = THINKING_BY_NAME[name]
    opens, *_, closes = markers.hides
    text = f"{markers.opens[0]}\nso\n{markers.closes[0]}\n{opens}\n4 <b>\n{closes}"
    found = read(AnswerReader(HERMES, markers, tools=TOOLS), text, random.Random(seed))
    assert (found.reasoning, found.text.rstrip()) == ("so", "4 <b>")


def test_a_call_ends_the_reasoning_without_its_marker() -> None:
    found = answer(f"<think>I call {STOP}")
    assert (found.reasoning, found.text, found.calls) == ("I call", "", [("stop", "{}")])


def test_a_call_may_have_to_wait_for_the_end_of_the_reasoning() -> None:
    reader = AnswerReader(HERMES, THINK, tools=TOOLS, calls_end_thinking=False)
    found = read(reader, f"<think>Perhaps {STOP}?</think>{STOP}")
    assert (found.reasoning, found.calls) == (f"Perhaps {STOP}?", [("stop", "{}")])


def test_text_around_calls_is_told_without_the_space_between() -> None:
    found = answer(f"before\n\n{STOP}\n{STOP}\n\nafter\n")
    assert found.text == "beforeafter\n" and len(found.calls) == 2


@pytest.mark.parametrize(
    "text",
    [
        "write <tool_call> to call",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>[{"name": "stop", "arguments": {}}]</tool_call>',
        "<tool_call>" + " " * 5000 + '{"name": "stop"}',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for seed in range(5):
        found = answer(text, seed=seed)
        assert (found.text, found.calls) == (text, [])


def test_calls_are_text_where_no_tools_were_given() -> None:
    assert answer(STOP, calls=False).text == STOP


def test_arguments_pass_while_they_are_written() -> None:
    reader = AnswerReader(HERMES, None, tools=TOOLS, holds_calls=False)
    reader.push('<tool_call>{"name": "get_weather", "arguments": {"city": "P')
    found = Answer(calls=[("get_weather", "")])
    found.add(reader.push("aris"))
    assert found.calls == [("get_weather", "aris")]


def test_any_text_is_read_the_same_however_it_is_cut() -> None:
    pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", STOP, '"name"', '"stop"', "arguments"]
    pieces += ["{", "}", ":", "\n", " a ", "<", '"', "\\"]
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 30)))
        assert answer(text, seed=seed) == read(AnswerReader(HERMES, THINK, tools=TOOLS), text)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY, START = "<|channel|>commentary", "<|start|>assistant"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("text", "reasoning", "shown", "calls"),
    [
        (f"{ANALYSIS}a<|end|>{START}{FINAL}b", "a", "b", []),
        (f"{FINAL}b", "", "b", []),
        (f"{ANALYSIS}a{START}{FINAL}b<|end|>", "a", "b", []),
        (f"{ANALYSIS}a{FINAL}b", "a", "b", []),
        (f"{START}<|channel|>final <|constrain|>json<|message|>" + "{}", "", "{}", []),
        (f"{ANALYSIS}a<|end|>{START}{COMMENTARY}<|message|>so: <|end|>{START}{ANALYSIS}c", "ac", "so:", []),
        (f" to=functions.stop{COMMENTARY} json<|message|>" + "{}", "", "", [("stop", "{}")]),
        (
            f"{ANALYSIS}a<|end|>{START}{COMMENTARY} to=functions.stop <|constrain|>json<|message|>"
            + "{}<|call|>",
            "a",
            "",
            [("stop", "{}")],
        ),
        (f"{COMMENTARY} to=stop json<|message|>" + "{}<|call|>", "", "", [("stop", "{}")]),
        (f"{COMMENTARY} to=python code<|message|>1<|call|>{START}{FINAL}b", "", "b", []),
        (f"{FINAL}write to=functions.stop in it", "", "write to=functions.stop in it", []),
        (f"{ANALYSIS}cut off", "cut off", "", []),
    ],
)
def test_channels(text: str, reasoning: str, shown: str, calls: list[tuple[str, str]], seed: int) -> None:
    dialect, thinking = DIALECTS_BY_NAME["openai"], THINKING_BY_NAME["openai_gptoss"]
    found = read(AnswerReader(dialect, thinking, tools=TOOLS), text, random.Random(seed))
    assert (found.reasoning, found.text, found.calls) == (reasoning, shown, calls)


def test_of_arguments_that_are_given_twice_the_first_count() -> None:
    given_twice = (
        '"name": "stop", "arguments": {"a": 1}, "parameters": {"b": 2}',
        '"arguments": {"a": 1}, "name": "stop", "arguments": "{}"',
    )
    for fields in given_twice:
        found = answer(f"<tool_call>{{{fields}}}</tool_call>")
        assert (found.calls, found.ended) == ([("stop", '{"a": 1}')], 1)


CALL_31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "stop", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": "", "name": "stop"}</tool_call>'),
        ("llama3_json", '{"name": "stop", "parameters": null}'),
        ("llama3_json", '{"name": "stop", "parameters": 12}'),
        ("deepseek_v31", CALL_31 + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("openai", f"{COMMENTARY} to=functions.stop json<|message|><|call|>"),
    ],
)
@pytest.mark.parametrize("holds", [True, False], ids=["held", "streamed"])
def test_a_call_without_arguments_has_empty_ones(name: str, text: str, holds: bool) -> None:
    reader = AnswerReader(DIALECTS_BY_NAME[name], None, tools=TOOLS, holds_calls=holds)
    found = read(reader, text, random.Random(0))
    assert (found.text, found.calls, found.ended) == ("", [("stop", "{}")], 1)
    assert reader.repairs == ["the arguments are missing"]


KIMI = "<|tool_calls_section_begin|>{}<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
PARIS = '{"city": "Paris"}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>",
        ),
        ("seed_oss", "<seed:tool_call><function=get_weather\n<parameter=city\nParis</parameter></function>"),
        ("gemma4", '<|tool_call>:call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'),
        ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</tool_call>"),
        ("hermes", '<tool_call><tool_call>{"name": "get_weather", "arguments": ' + PARIS + "}</tool_call>"),
        ("kimi_k2", KIMI.format("so:") + PARIS + "<|tool_call_end|><|tool_calls_section_end|>"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_call_whose_markup_is_wrong_is_read_as_it_is_meant(name: str, text: str, seed: int) -> None:
    reader = AnswerReader(DIALECTS_BY_NAME[name], None, tools=TOOLS)
    found = read(reader, "I look.\n" + text, random.Random(seed))
    assert (found.text, [(call, json.loads(given)) for call, given in found.calls]) == (
        "I look.",
        [("get_weather", {"city": "Paris"})],
    )
    assert len(reader.repairs) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_call_of_gemma_may_lack_its_opener_where_no_text_stands_before_it(seed: int) -> None:
    thinking, cut = THINKING_BY_NAME["gemma4"], random.Random(seed)
    for before, text, calls in (
        ("", "", [("stop", "{}")]),
        ("<|channel>thought\ncall:stop{}?<channel|>", "", [("stop", "{}")]),
        ("I write ", "I write call:stop{}", []),
    ):
        reader = AnswerReader(DIALECTS_BY_NAME["gemma4"], thinking, tools=TOOLS)
        found = read(reader, before + "call:stop{}", cut)
        assert (found.text, found.calls, len(reader.repairs)) == (text, calls, len(calls))


def test_where_reasoning_is_always_closed_no_call_ends_it() -> None:
    mistral = THINKING_BY_NAME["mistral"]
    format = format_with(DIALECTS_BY_NAME["mistral"], mistral, {}, "[TOOL_CALLS]")
    told = format.thinking_within(demo_tokenizer(), 10, is_open=False, calls=True)
    assert told.marker and not told.ends
    reader = AnswerReader(format.dialect, mistral, tools=TOOLS)
    found = read(reader, "[THINK][TOOL_CALLS]stop{} perhaps[/THINK][TOOL_CALLS]stop{}")
    assert (found.reasoning, found.calls) == ("[TOOL_CALLS]stop{} perhaps", [("stop", "{}")])


# The free text of a custom tool.


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def input_of(pieces: list[str]) -> list[str]:
    reader = CustomToolInput()
    found = [*(reader.push(piece) for piece in pieces), reader.end()]
    assert reader.text == "".join(found)
    return found


CHARACTERS = st.characters(exclude_categories=["Cs"])


@untimed()
@given(st.text(CHARACTERS), st.lists(st.integers(0, 1000)), st.booleans())
def test_the_input_of_a_custom_tool_is_the_same_however_it_was_cut(
    text: str, cuts: list[int], escapes: bool
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escapes)
    assert "".join(input_of(pieces_of(arguments, cuts))) == text


def test_an_input_comes_while_it_is_written() -> None:
    assert input_of([' {"inp', 'ut" : "a', "\\", "nb", "\\u00e9\\ud83d", '\\ude42"', "}"]) == [
        *("", "a", "", "\nb", "é", "🙂", "", ""),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"other": 1, "input": "late"}', "late"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"text": "a"}', '{"text": "a"}'),
        ("[1]", "[1]"),
        ('"late"', "late"),
        ('{"inp', '{"inp'),
        ("", ""),
        ('{"input": "cut \\u12', "cut "),
        ('{"input": "a\nb\tc"}', "a\nb\tc"),
        ('{"input": "half \\ud83d of it"}', "half � of it"),
        ('{"input": "bad \\u12x4 escape"}', "bad "),
    ],
)
def test_an_input_in_another_form_comes_as_it_is(arguments: str, text: str) -> None:
    assert "".join(input_of(list(arguments))) == text
    assert "".join(input_of([arguments])) == text
