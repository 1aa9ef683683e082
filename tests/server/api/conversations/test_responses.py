"""Bodies of POST /v1/responses in the words of chat completions, and what is refused of them."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from server.api.conversations.response_input import NOT_READ, read_tool_choice, read_tools
from server.api.conversations.responses import PASSED, ResponsesRequest
from server.api.conversations.transcript import seal, unsealed
from server.errors import BadRequest

FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "seen"}


def parsed(**body: Any) -> ResponsesRequest:
    return TypeAdapter(ResponsesRequest).validate_python({"input": "hi", **body})


def messages(*items: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in parsed(input=list(items), **body).chat.messages]


def refusal(**body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        _ = parsed(**body).chat
    return refused.value


def test_a_text_is_what_the_user_says() -> None:
    chat = parsed(instructions="be brief").chat
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]


def test_messages_with_and_without_a_type() -> None:
    said = messages(
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
            "id": "x",
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    )
    assert [message["role"] for message in said] == ["developer", "user", "assistant", "assistant"]
    assert [message["content"] for message in said[1:]] == [
        [{"type": "text", "text": text}] for text in ("a", "b", "no")
    ]


def test_a_turn_is_one_message_of_reasoning_text_and_calls() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = messages(
        {"role": "user", "content": "a"},
        reasoning,
        {"role": "assistant", "content": "I look."},
        CALL,
        {**CALL, "call_id": "c2", "arguments": ""},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "more"}]},
        {"role": "user", "content": "go on"},
    )
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "tool", "user"]
    turn = said[1]
    assert (turn["content"], turn["reasoning_content"], turn["reasoning"]) == ("I look.", "hm", "hm")
    assert [(call["id"], call["function"]["arguments"]) for call in turn["tool_calls"]] == [
        ("c1", '{"a": 1}'),
        ("c2", "{}"),
    ]
    assert said[2] == {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "seen"}


def test_each_round_of_calls_is_a_turn() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "again"}]}
    said = messages(CALL, RESULT, thought, {**CALL, "call_id": "c2"}, {**RESULT, "call_id": "c2"})
    assert [message["role"] for message in said] == ["assistant", "tool", "assistant", "tool"]
    assert said[2]["reasoning_content"] == "again"


def test_text_behind_calls_is_another_message() -> None:
    said = messages(CALL, {"role": "assistant", "content": "done"}, {"role": "user", "content": "a"})
    assert [("tool_calls" in message, message["content"]) for message in said] == [
        (True, ""),
        (False, "done"),
        (False, "a"),
    ]


def test_sealed_reasoning_comes_back() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal("Zoë thinks")}
    said = messages(item, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
    assert said[0]["reasoning_content"] == "Zoë thinks"


@pytest.mark.parametrize("content", [None, 1, "gAAAAAB", "facet1.ä", "facet1.%%", "facet1./w=="])
def test_what_others_have_sealed_is_empty(content: object) -> None:
    assert unsealed(content) == ""


def test_custom_tools_are_functions_of_one_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = [{"type": "custom", "name": "patch", "format": grammar}, FUNCTION]
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a"b'}
    body = parsed(
        input=[call, {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}], tools=tools
    )
    patch, look = body.chat.tools or []
    assert patch.function.parameters is not None
    assert patch.function.parameters["required"] == ["input"]
    assert "start: /a/" in json.dumps(patch.function.parameters)
    assert look.for_template()["function"] == {key: FUNCTION[key] for key in FUNCTION if key != "type"}
    [function] = [call.function for call in body.chat.messages[0].tool_calls or []]
    assert json.loads(str(function.arguments)) == {"input": 'a"b'}
    assert patch.held_to == "^(?:(?:(?:(?:a))))$" and body.warnings == []


def test_a_grammar_that_leads_back_to_itself_is_only_told() -> None:
    format = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
    body = parsed(input="hi", tools=[{"type": "custom", "name": "patch", "format": format}])
    assert body.chat.tools and body.chat.tools[0].held_to is None
    assert body.warnings == ["grammars told to the model but not enforced: patch"]


def test_tools_of_a_namespace_have_names_of_their_own() -> None:
    tools = [{"type": "namespace", "name": "crm", "description": "", "tools": [FUNCTION]}, FUNCTION]
    body = parsed(tools=tools, input=[{**CALL, "namespace": "crm"}, RESULT])
    assert list(body.known_tools.called) == ["crm__look", "look"]
    assert body.known_tools.client_name("crm__look").namespace == "crm"
    [call] = body.chat.messages[0].tool_calls or []
    assert call.function.name == "crm__look"


def test_choices_of_tools_are_those_of_chat() -> None:
    tools = read_tools([FUNCTION, {"type": "web_search"}])
    named = {"type": "function", "function": {"name": "look"}}
    look = {"type": "function", "name": "look"}
    assert read_tool_choice("required", tools) == "required"
    assert read_tool_choice(look, tools) == read_tool_choice({**look, "type": "custom"}, tools) == named
    inside = read_tool_choice({**look, "namespace": "crm"}, tools)
    assert inside == {"type": "function", "function": {"name": "crm__look"}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [look, {"type": "web_search"}]}
    assert read_tool_choice(allowed, tools) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [named]},
    }


def test_tools_that_nobody_runs_here_are_left_out_beside_others() -> None:
    body = parsed(tools=[FUNCTION, {"type": "web_search"}, {"type": "image_generation"}])
    assert len(body.chat.tools or []) == 1
    assert body.warnings == ["tools left out, which this server does not run: web_search, image_generation"]


@pytest.mark.parametrize("kind", ["web_search", "mcp", "file_search", "computer_use_preview"])
def test_a_tool_that_nobody_runs_here_is_refused_alone_and_by_choice(kind: str) -> None:
    assert kind in refusal(tools=[{"type": kind}]).message
    assert kind in refusal(tools=[FUNCTION, {"type": kind}], tool_choice={"type": kind}).message


def test_items_that_no_model_reads_are_left_out() -> None:
    body = parsed(input=[{"type": "web_search_call", "id": "w"}, {"role": "user", "content": "a"}])
    assert len(body.chat.messages) == 1
    assert body.warnings == ["items left out, which no model here reads: web_search_call"]
    assert "item_reference" not in NOT_READ


def test_a_shell_that_an_older_codex_has_called() -> None:
    call = {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}}
    said = messages(call, {"type": "function_call_output", "call_id": "c1", "output": "a.txt"})
    assert said[0]["tool_calls"][0]["function"]["name"] == "local_shell" and said[1]["content"] == "a.txt"


def test_formats_of_the_text_are_those_of_chat() -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    body = parsed(text={"format": {"type": "text"}, "verbosity": "low"}, reasoning={"effort": "high"})
    assert (body.chat.verbosity, body.chat.reasoning_effort) == ("low", "high")
    assert parsed(text={"format": schema}).chat.response_format is not None


def test_fields_that_chat_has_under_the_same_name() -> None:
    given = {
        "model": "tiny", "temperature": 0.5, "top_p": 0.5, "stream": True, "seed": 3, "stop": ["x"],
        "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "chat_template_kwargs": {"a": 1}, "priority": 2, "cache_salt": "s",
        "request_id": "r", "timeout": 9.0, "speculative_tokens": 2,
    }  # fmt: skip
    assert given.keys() == set(PASSED)
    chat = parsed(**given, max_output_tokens=7).chat
    assert {name: getattr(chat, name) for name in PASSED} == given
    assert chat.max_completion_tokens == 7


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"conversation": "conv_1"}, "conversation", "send the items again"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the items again"),
        ({"prompt": {"id": "p"}}, "prompt", "keeps none"),
        ({"include": ["everything"]}, "include", "message.output_text.logprobs"),
        ({"input": []}, "input", "nothing to answer"),
        ({"input": 1}, "input", "list of objects"),
        ({"input": ["a"]}, "input[0]", "object"),
        ({"input": [{"type": "wish"}]}, "input[0].type", "function_call"),
        ({"input": [{}]}, "input[0].type", "got none"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "developer"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content", "string or a list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
            "input_file",
        ),
        ({"input": [RESULT]}, "input[0].call_id", "no call with the id 'c1'"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name", "string"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "another tool"),
        ({"tools": [{"type": "wish"}]}, "tools[0]", "namespace"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 1}]}, "tools[0].tools", "list"),
        ({"tools": [{"type": "custom", "name": "a", "format": 1}]}, "tools[0].format", "object"),
        ({"moderation": {}}, "moderation", "moderation"),
        ({"inptu": "a"}, "inptu", "input"),
    ],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], param: str, says: str) -> None:
    error = refusal(**body)
    assert error.param == param and says in error.message


def test_fields_without_effect_are_accepted() -> None:
    parsed(
        store=True, metadata={"a": "b"}, user="u", safety_identifier="s", service_tier="auto",
        max_tool_calls=3, prompt_cache_key="k", prompt_cache_retention="24h", truncation="disabled",
        stream_options={"include_obfuscation": False}, parallel_tool_calls=True, background=False,
        context_management=None, include=["web_search_call.action.sources"],
        reasoning={"effort": None, "summary": "auto"},
    )  # fmt: skip


def test_a_wrong_type_is_named() -> None:
    with pytest.raises(ValidationError) as refused:
        parsed(tools=["a", "b"])
    [error] = refused.value.errors()
    assert error["loc"] == ("tools", 0)


def test_reasoning_in_many_items_is_joined_once() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 300}]}
    said = messages(*[item] * 8000, {"role": "user", "content": "a"})
    assert len(said) == 2 and said[0]["reasoning"] == "x" * 300 * 8000
