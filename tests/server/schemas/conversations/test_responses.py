"""Bodies of POST /v1/responses in the words of chat completions, and what is refused of them."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from server.schemas.conversations.response_input import read_tool_choice, read_tools
from server.schemas.conversations.responses import PASSED, ResponsesRequest
from server.schemas.conversations.transcript import unsealed

FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}


def parsed(**body: Any) -> ResponsesRequest:
    return TypeAdapter(ResponsesRequest).validate_python({"input": "hi", **body})


def messages(*items: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in parsed(input=list(items), **body).chat.messages]


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


def test_reasoning_in_many_items_is_joined_once() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 300}]}
    said = messages(*[item] * 8000, {"role": "user", "content": "a"})
    assert len(said) == 2 and said[0]["reasoning"] == "x" * 300 * 8000
