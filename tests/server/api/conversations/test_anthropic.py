"""Bodies of POST /v1/messages in the words of chat completions, and what is refused of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from server.api.conversations.anthropic import CountTokensRequest, MessagesInput, MessagesRequest
from server.api.conversations.transcript import seal
from server.errors import BadRequest

TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "seen"}


def parsed(*messages: dict[str, Any], **body: Any) -> MessagesRequest:
    said = {"model": "tiny", "max_tokens": 9, "messages": list(messages) or [USER], **body}
    return TypeAdapter(MessagesRequest).validate_python(said)


def written(*messages: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in parsed(*messages, **body).chat.messages]


def texts(*said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in said]


def test_what_the_system_says_comes_first() -> None:
    cached = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
    assert written(system="be")[0] == {"role": "system", "content": "be"}
    assert written(system=[cached])[0] == {"role": "system", "content": texts("be brief")}
    assert [message["role"] for message in written(system=[])] == ["user"]


def test_the_block_that_differs_in_each_request_is_left_out() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abcde;"}
    assert written(system=[billing, {"type": "text", "text": "be"}])[0]["content"] == texts("be")
    assert len(written(system=[billing])) == 1


def test_a_message_of_the_system_between_others_keeps_its_place() -> None:
    said = written(USER, {"role": "system", "content": texts("be")}, USER)
    assert [message["role"] for message in said] == ["user", "system", "user"]


def test_a_turn_is_one_message_and_results_are_messages_of_the_tool() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "whoever signed it"}
    turn = [thinking, {"type": "redacted_thinking", "data": "x"}, *texts("I look."), CALL]
    results = [RESULT, {**RESULT, "content": texts("more"), "is_error": True}, *texts("go", "on")]
    said = written(USER, {"role": "assistant", "content": turn}, {"role": "user", "content": results})
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "tool", "user"]
    assert said[1]["reasoning_content"] == "hm" and said[1]["content"] == texts("I look.")
    [call] = said[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "é"}
    assert said[2] == {"role": "tool", "tool_call_id": "t1", "name": "look", "content": "seen"}
    assert said[3]["content"] == texts("more") and said[4]["content"] == texts("go", "on")


def test_thinking_that_was_hidden_comes_back_from_its_signature() -> None:
    turn = [{"type": "thinking", "thinking": "", "signature": seal("hm")}, *texts("yes")]
    said = written(USER, {"role": "assistant", "content": turn}, USER)
    assert said[1]["reasoning_content"] == "hm"


def test_other_blocks_of_text() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
    reference = {**RESULT, "content": [{"type": "tool_reference", "tool_name": "look"}]}
    said = written(
        {"role": "user", "content": [document]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [reference, {**RESULT, "content": None}]},
    )
    assert said[0]["content"] == texts("a")
    assert [message["content"] for message in said[2:]] == [texts("look"), ""]


def test_an_answer_that_is_begun_is_continued() -> None:
    chat = parsed(USER, {"role": "assistant", "content": "{"}).chat
    assert chat.continue_final_message and not chat.add_generation_prompt
    assert not parsed(USER, {"role": "assistant", "content": [CALL]}).chat.continue_final_message
    assert not parsed(USER).chat.continue_final_message


def test_tools_are_functions() -> None:
    body = parsed(tools=[TOOL, {**TOOL, "name": "see", "type": "custom", "strict": True}])
    look, see = body.chat.tools or []
    assert look.for_template() == {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
    }
    assert see.function.strict is True


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124", "mcp_toolset"])
def test_tools_that_nobody_runs_here(kind: str) -> None:
    body = parsed(tools=[TOOL, {"type": kind, "name": "x"}])
    assert body.warnings == [f"tools left out, which this server does not run: {kind}"]
    with pytest.raises(BadRequest, match=kind):
        _ = parsed(tools=[{"type": kind, "name": "x"}]).chat


def test_blocks_that_no_model_reads_are_left_out() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    body = parsed(USER, {"role": "assistant", "content": [search, *texts("so")]}, USER)
    assert body.chat.messages[1].content == texts("so")
    assert body.warnings == ["blocks left out, which no model here reads: server_tool_use"]


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], asked: object) -> None:
    body = parsed(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    fields = body._asked()
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (asked, False)


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "omitted"}, None),
        (None, None),
    ],
)
def test_thinking_sets_the_switch_of_the_template(thinking: Any, thinks: bool | None) -> None:
    chat = parsed(thinking=thinking).chat
    assert chat.enable_thinking is thinks
    assert chat.thinking_token_budget == (2000 if thinks else None)


def test_fields_of_the_sampling() -> None:
    chat = parsed(
        stop_sequences=["x"], temperature=0.5, top_p=0.4, top_k=3, output_config={"effort": "max"}
    ).chat
    assert (chat.max_completion_tokens, chat.stop, chat.temperature) == (9, ["x"], 0.5)
    assert (chat.top_p, chat.top_k, chat.reasoning_effort) == (0.4, 3, "max")


def test_formats_of_the_text_are_those_of_chat() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": {"type": "object"}},
    }
    assert parsed(output_config={"format": format})._asked()["response_format"] == expected
    assert parsed(output_format=format)._asked()["response_format"] == expected
    assert parsed()._asked()["response_format"] is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "list of objects"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role is one of user"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content should be a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "the type base64 and `data`"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "'tool_use' are not supported in the content"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "no call with the id 't1'"),
        ({"messages": [{"role": "assistant", "content": [{**CALL, "input": 1}]}]}, "should be an object"),
        ({"system": 1}, "system should be a list"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "wish"}]}, "'wish'"),
        ({"tools": [{**TOOL, "description": 1}]}, "string_type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_token": 1}, "max_tokens"),
        ({"stop_sequences": ["a"] * 17}, "at most 16"),
    ],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as refused:
        _ = parsed(**body).chat
    assert says in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": None},
        {"max_tokens": -1},
        {"model": None},
        {"thinking": {"type": "deep"}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"tool_choice": {"type": "some"}},
    ],
)
def test_wrong_types_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        parsed(**body)


def test_fields_without_effect_are_accepted() -> None:
    parsed(
        metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}, speed="standard",
        context_management={"edits": []}, inference_geo="us", betas=["a"], mcp_servers=[], container=None,
        diagnostics={}, user_profile_id="p",
    )  # fmt: skip


def test_to_count_tokens_needs_no_length() -> None:
    body = {"model": "tiny", "messages": [USER], "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted: MessagesInput = TypeAdapter(CountTokensRequest).validate_python(body)
    assert counted.chat.messages == parsed(tools=[TOOL]).chat.messages
