"""What a model or its tools have written wrongly in chats, and the messages that templates get of it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from server.errors import BadRequest
from server.schemas.body import read_json
from server.schemas.chat import BatchChatRequest, ChatRequest
from server.schemas.messages import Message
from server.schemas.repaired_history import arguments_of, repaired

BLOB = "A" * 5000


def shown(**message: Any) -> tuple[dict[str, Any], list[str]]:
    """A message as a template gets it, and the repairs."""
    repairs: Counter[str] = Counter()
    return Message.model_validate(repaired(message, repairs)).for_template(), list(repairs)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, {}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": "\\ud83d"}', {"a": "�"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    ],
)
def test_arguments_are_read(given: object, read: dict[str, Any]) -> None:
    repairs: Counter[str] = Counter()
    assert arguments_of(given, repairs) == read and not repairs


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ('{"a": "b', '{"a": "b'),
        ('{"a": 1}{"b": 2}', '{"a": 1}{"b": 2}'),
        ("[1]", "[1]"),
        ("null", "null"),
        (7, "7"),
        ([{"a": 1}], '[{"a": 1}]'),
        ('{"a":' * 70 + "1" + "}" * 70, '{"a":' * 70 + "1" + "}" * 70),
        ('{"a":' * 9000, '{"a":' * 9000),
    ],
)
def test_arguments_that_are_no_object_are_the_text_of_one(given: object, text: str) -> None:
    repairs: Counter[str] = Counter()
    assert arguments_of(given, repairs) == {"input": text} and sum(repairs.values()) == 1


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}, **fields}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (call(), call()),
        (call(id=7), call(id="7")),
        (call(type="tool"), call()),
        ({"function": {"name": "f"}}, {key: call()[key] for key in ("type", "function")}),
        (call(function={"name": ""}), call(function={"name": "unnamed", "arguments": {}})),
        (call(function=None), call(function={"name": "unnamed", "arguments": {}})),
        ("f()", {"type": "function", "function": {"name": "unnamed", "arguments": {"input": "f()"}}}),
        (
            {"type": "custom", "id": "c", "custom": {"name": "f", "input": "x"}},
            call(function={"name": "f", "arguments": {"input": "x"}}),
        ),
    ],
)
def test_calls(given: object, seen: dict[str, Any]) -> None:
    message, _ = shown(role="assistant", content=None, tool_calls=[given])
    assert message == {"role": "assistant", "content": "", "tool_calls": [seen]}


@pytest.mark.parametrize("calls", [None, [], {}])
def test_no_calls(calls: object) -> None:
    message, _ = shown(role="assistant", content="a", tool_calls=calls)
    assert message["content"] == "a" and len(message.get("tool_calls", [])) == (calls == {})


@pytest.mark.parametrize(
    ("content", "seen", "repairs"),
    [
        (None, "", 0),
        ("half \ud83d", "half �", 0),
        (7, "7", 1),
        ({"ok": True}, '{"ok": true}', 1),
        ([], [], 0),
        (["a"], [{"type": "text", "text": "a"}], 0),
        ([{"type": "output_text", "text": "a"}], [{"type": "text", "text": "a"}], 0),
        ([{"type": "text", "text": None}], [{"type": "text", "text": ""}], 0),
        ([{"type": "refusal", "refusal": "no"}], [{"type": "text", "text": "no"}], 0),
        ([{"type": ["odd"]}], [{"type": "text", "text": '{"type": ["odd"]}'}], 1),
        ([None], [{"type": "text", "text": "null"}], 1),
        (
            [{"type": "image", "data": BLOB}],
            [{"type": "text", "text": '{"type": "image", "data": …'}],
            1,
        ),
        ([{"type": "image_url"}], [{"type": "text", "text": '{"type": "image_url"}'}], 1),
        ([{"type": "image_url", "image_url": "u"}], [{"type": "image_url", "image_url": "u"}], 0),
    ],
)
@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_contents(role: str, content: object, seen: object, repairs: int) -> None:
    message, found = shown(role=role, content=content)
    assert message == {"role": role, "content": seen} and len(found) == repairs


def test_parts_of_reasoning_go_where_templates_look_for_it() -> None:
    thoughts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "redacted_thinking"},
    ]
    message, _ = shown(role="assistant", content=[*thoughts, {"type": "text", "text": "a"}])
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert message["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_both_names_under_which_templates_look_for_it(name: str) -> None:
    message, found = shown(role="assistant", content="a", **{name: "hm"})
    assert message["reasoning"] == message["reasoning_content"] == "hm" and not found


def test_reasoning_before_calls_has_the_name_under_which_gpt_oss_looks_for_it() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message, _ = shown(role="assistant", content=None, reasoning="hm", tool_calls=calls)
    assert message["thinking"] == "hm"
    message, _ = shown(role="assistant", content="I look.", reasoning="hm", tool_calls=calls)
    assert "thinking" not in message  # its template refuses both


def test_fields_that_should_be_texts() -> None:
    given = {"tool_call_id": 3, "name": {"x": 1}, "reasoning": None, "reasoning_content": [{"text": "t"}]}
    message, _ = shown(role="tool", content="a", **given)
    assert message == {"role": "tool", "content": "a", "tool_call_id": "3", "reasoning_content": "t"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "smell"}]},
        {"role": "user", "content": None},
        {"role": "system", "content": 5},
        {"role": 5, "content": "a"},
    ],
)
def test_what_others_write_wrongly_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        read_json(json.dumps({"messages": [message]}).encode(), ChatRequest.model_validate)


def test_each_conversation_of_a_batch_is_repaired() -> None:
    broken = [{"role": "user", "content": "a"}, {"role": "assistant", "content": 7}]
    body = BatchChatRequest.model_validate({"messages": [broken, broken]})
    assert [said[1].content for said in body.conversations] == ["7", "7"]
    assert body.repairs[0].endswith("contents that are neither texts nor parts (2)")


def test_repairs_are_told() -> None:
    broken = {"role": "assistant", "tool_calls": [call(function={"name": "f", "arguments": "{"})] * 2}
    tools = [{"type": "web_search"}, {"type": "web_search"}, {"type": "mcp"}]
    body = ChatRequest.model_validate({"messages": [broken], "tools": tools})
    assert body.tools is None
    assert body.model_copy().repairs == [
        "tools left out, which this server does not run: web_search, mcp",
        "repaired in messages of the assistant and of tools: "
        "arguments that are not a JSON object, shown as `input` (2)",
    ]
