"""The format of answers is found by asking the chat template, and by the vocabulary where that says nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
from answers import TOOLS, FakeTokenizer, read

from server.output_parsing.answer_format import AnswerFormat
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.format_detection import find_format
from server.output_parsing.tool_call_dialects import (
    DIALECTS_BY_NAME,
    THINKING_BY_NAME,
    dialect_named,
    thinking_named,
)
from server.text.chat_template import ChatTemplate

FUNCTION = "{{ c.function.name }}"
JSON = "{{ c.function.arguments | tojson }}"
TAGS = (
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
)
GLM = (
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
)
CALLS = {
    "hermes": f'\n<tool_call>\n{{"name": "{FUNCTION}", "arguments": {JSON}}}\n</tool_call>',
    "qwen3_coder": f"\n<tool_call>\n<function={FUNCTION}>\n{TAGS}</function>\n</tool_call>",
    "glm45": f"\n<tool_call>{FUNCTION}\n{GLM}</tool_call>",
    "minicpm5": (
        f'\n<function name="{FUNCTION}">{{% for k, v in c.function.arguments.items() %}}<param name="{{{{ k }}}}">'
        "{{ v if v is string else v | tojson }}</param>{% endfor %}</function>"
    ),
    "llama3_json": f'{{"name": "{FUNCTION}", "parameters": {JSON}}}',
    "mistral": f"[TOOL_CALLS]{FUNCTION}[ARGS]{JSON}",
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{FUNCTION}{{{{ '<｜tool▁sep｜>' + c.function.arguments }}}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions."
        f"{FUNCTION}:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "nemotron_nano_v2": f'<TOOLCALL>[{{"name": "{FUNCTION}", "arguments": {JSON}}}]</TOOLCALL>',
    "openai": f"<|start|>assistant to=functions.{FUNCTION}<|channel|>commentary json<|message|>{JSON}<|call|>",
    "minimax_m3": (
        f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{FUNCTION}">'
        "{% for k, v in c.function.arguments.items() %}]<]minimax[>[<{{ k }}>{{ v }}]<]minimax[>[</{{ k }}>{% endfor %}"
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "apertus": f'<|tools_prefix|>[{{"{FUNCTION}": {JSON}}}]<|tools_suffix|>',
}


def template(call: str, *, before: str = "") -> str:
    return (
        before + "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )


def found(source: str | None, tokens: Sequence[str] = ()) -> AnswerFormat:
    chat = ChatTemplate({} if source is None else {"default": source}, {})
    return find_format(FakeTokenizer(chat, {token: 10 + i for i, token in enumerate(tokens)}), "auto", "auto")


@pytest.mark.parametrize("name", list(CALLS))
def test_the_template_is_asked(name: str) -> None:
    dialect = found(template(CALLS[name])).dialect
    assert dialect is not None and dialect.name == name


def test_an_example_in_the_instructions_is_no_call() -> None:
    example = 'Answer <tool_call>{"name": "NAME", "arguments": {}}</tool_call>\n'
    dialect = found(template(CALLS["mistral"], before=example)).dialect
    assert dialect is not None and dialect.name == "mistral"


def test_a_call_begins_behind_what_the_prompt_has_written() -> None:
    call = "{{ '<|start|>assistant to=' }}functions." + CALLS["openai"].partition("functions.")[2]
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}" + call + "{% else %}<|start|>{{ m.role }}"
        "{{ m.content }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    assert found(source).opener == " to=functions."


@pytest.mark.parametrize(
    ("source", "tokens", "name"),
    [
        ("{{ messages[0].content }}", ["[TOOL_CALLS]"], "mistral"),
        ("{{ raise_exception('no') }}", ["<|tool_call_start|>"], "lfm2"),
        ("{# <TOOLCALL> #}{{ messages[0].content }}", [], "nemotron_nano_v2"),
        (None, ["<start_function_call>"], "functiongemma"),
        ("{{ messages[0].content }}", ["<s>", "[", "{"], None),
        (None, [], None),
    ],
)
def test_markers_tell_where_the_template_writes_no_calls(
    source: str | None, tokens: list[str], name: str | None
) -> None:
    dialect = found(source, tokens).dialect
    assert (dialect and dialect.name) == name


@pytest.mark.parametrize(
    ("source", "tokens", "name"),
    [
        (None, ["<think>", "</think>"], "think"),
        ("{{ '</think>' in messages[0].content }}", [], "think"),
        (None, ["[THINK]", "[/THINK]"], "mistral"),
        (None, ["<think>", "</think>", "<response>", "</response>"], "ernie45"),
        (None, ["<|channel|>", "<|constrain|>", "<|end|>", "<|message|>"], "openai_gptoss"),
        (None, ["<think>", "</think>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"], "kimi_k3"),
        (None, ["<|end|>"], None),
        (None, [], None),
    ],
)
def test_markers_of_reasoning(source: str | None, tokens: list[str], name: str | None) -> None:
    thinking = found(source, tokens).thinking
    assert (thinking and thinking.name) == name


def test_special_tokens_are_marks() -> None:
    format = found(template(CALLS["hermes"]), ["<tool_call>", "</tool_call>", "<|end|>", "name"])
    assert sorted(format.marks) == [10, 11]
    assert format.dialect is not None and format.dialect.opens == (format.marks[10],)
    call = '{"name": "stop", "arguments": {}}'
    for opener, calls in (("<tool_call>", 0), (format.marks[10], 1)):
        reader = AnswerReader(format.dialect, None, tools=TOOLS, written=format.written)
        assert len(read(reader, opener + call).calls) == calls


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [("hi<think>\n", True), ("<think>a</think>", False), ("", False), ("<think> a", False)],
)
def test_whether_a_prompt_has_opened_the_reasoning(prompt: str, begins: bool) -> None:
    assert found(None, ["<think>", "</think>"]).begins_thinking(prompt) == begins


def test_names_of_the_peers_and_wrong_ones() -> None:
    assert dialect_named("qwen3_xml") is DIALECTS_BY_NAME["qwen3_coder"]
    assert dialect_named("llama4_json") is DIALECTS_BY_NAME["llama3_json"]
    assert dialect_named("poolside_v1") is DIALECTS_BY_NAME["glm45"]
    assert thinking_named("poolside_v1") is THINKING_BY_NAME["think"]
    assert thinking_named("deepseek_r1") is THINKING_BY_NAME["think"]
    assert dialect_named("none") is None and thinking_named("none") is None
    with pytest.raises(ValueError, match=r"--tool-call-parser: .* 'hermez'. There are .*hermes"):
        dialect_named("hermez")
    with pytest.raises(ValueError, match=r"--reasoning-parser: .* 'qwen'. There are .*qwen3"):
        thinking_named("qwen")


def test_a_tokenizer_that_is_used_no_more_is_not_kept() -> None:
    tokenizer = FakeTokenizer()
    assert find_format(tokenizer) is find_format(tokenizer)
    kept = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert kept() is None
