"""A checkpoint's own description of its answers comes before its chat template, where it maps to our forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from answers import TOOLS, FakeTokenizer, read

from models.checkpoint.hub import DEMO
from server.grammar_checks.grammar_job import AskedTool, ask_for_calls, build_call_grammar
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.format_detection import find_format
from server.output_parsing.response_template import NAME, described_calls, described_thinking
from server.output_parsing.tool_call_dialects import DIALECTS_BY_NAME
from server.text.chat_template import ChatTemplate
from server.text.tokenizer_files import TokenizerFiles

WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TAG = r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
HERMES = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "transform": WHOLE}
QWEN_CODER = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": TAG},
    "transform": NAMED,
}
GEMMA = {
    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
    "close": "<tool_call|>",
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    "transform": NAMED,
}
OWN = {"open": "[[do]]", "close": "[[done]]", "repeats": True, "content": "json", "transform": WHOLE}
OWN_NAMED = {
    "open_pattern": r"\[\[do:(?P<name>[\w.]+)\]\]",
    "close": "[[done]]",
    "content": "json",
    "transform": NAMED,
}
ARGUMENTS = {"city": "Rome", "days": 3}
CALL = json.dumps(ARGUMENTS)


def template(calls: object, **more: object) -> dict[str, Any]:
    anchor = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
    return {**anchor, "fields": {"tool_calls": calls, "content": {"close": "<|im_end|>"}, **more}}


@pytest.mark.parametrize(
    ("calls", "name"), [(HERMES, "hermes"), (QWEN_CODER, "qwen3_coder"), (GEMMA, "gemma4")]
)
def test_what_a_family_in_our_tables_writes_is_that_family(calls: dict[str, Any], name: str) -> None:
    assert described_calls(template(calls)) == DIALECTS_BY_NAME[name]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (OWN, f'[[do]]{{"name": "get_weather", "arguments": {CALL}}}[[done]]'),
        (OWN_NAMED, f"[[do:get_weather]]{CALL}[[done]]"),
        (
            {
                "open_pattern": r"<do=(?P<name>\w+)>",
                "close": "</do>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<a (?P<key>\w+)>(?P<value>.*?)</a>"},
            },
            "<do=get_weather><a city>Rome</a><a days>3</a></do>",
        ),
    ],
)
def test_markers_that_no_family_of_ours_has(calls: dict[str, Any], text: str) -> None:
    found = find_format(FakeTokenizer(response_template=template(calls)))
    assert found.dialect is not None and found.dialect.name == NAME
    answer = read(AnswerReader(found.dialect, None, tools=TOOLS), f"So: {text}{text}")
    assert answer.text == "So:" or answer.text == "So: "
    assert [(name, json.loads(given)) for name, given in answer.calls] == [("get_weather", ARGUMENTS)] * 2


@pytest.mark.parametrize("calls", [OWN, OWN_NAMED])
def test_its_calls_can_be_required(calls: dict[str, Any]) -> None:
    markers = {"open": "[[why]]", "close": "[[so]]"}
    found = find_format(FakeTokenizer(response_template=template(calls, reasoning_content=markers)))
    tools = [AskedTool("stop", {"type": "object", "properties": {}}, bound=True)]
    asked = ask_for_calls(found, tools, required=True, several=False, is_thinking=False)
    text = build_call_grammar(asked).text
    assert "[[do" in text and "[[done]]" in text and "[[so]]" in text


@pytest.mark.parametrize(
    ("markers", "name"),
    [
        ({"open": "<think>", "close": "</think>"}, "think"),
        ({"open": "<|channel>thought\n", "close": "<channel|>"}, "gemma4"),
        ({"open": ["[[why]]", "[[how]]"], "close": "[[so]]"}, NAME),
        ({"open_pattern": "<t>|<u>", "close": "</t>"}, None),
        ({"open": "", "close": "</t>"}, None),
    ],
)
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_markers_of_reasoning(markers: dict[str, Any], name: str | None, key: str) -> None:
    found = described_thinking(template(HERMES, **{key: markers}))
    assert (found and found.name) == name


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"fields": []},
        {**template(HERMES), "version": 2},
        template("x"),
        template({}),
        template({**HERMES, "content": "kv-lines"}),
        template({**HERMES, "close": None}),
        template({**HERMES, "open_pattern": "(<a>|<b>)"}),
        template({**HERMES, "open_pattern": "a" * 1000}),
        template({**QWEN_CODER, "content_args": {"tag_pattern": "(?P<key>a)"}}),
        template({**QWEN_CODER, "content_args": 3}),
        template({**GEMMA, "content_args": {"unquoted_keys": True, "string_delims": [["<", ">"]]}}),
    ],
)
def test_what_is_more_than_we_know_is_left_to_the_chat_template(described: dict[str, Any]) -> None:
    assert described_calls(described) is None
    chat = ChatTemplate({"default": "<tool_call>"}, {})
    found = find_format(FakeTokenizer(chat, response_template=described))
    assert found.dialect is not None and found.described is None


def test_it_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    config["response_template"] = template(OWN)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = find_format(TokenizerFiles(str(tmp_path), str(tmp_path)).load())
    assert found.dialect is not None and found.dialect.opens == ("[[do]]",)
