"""Bodies of POST /v1/messages in the words of chat completions, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from server.schemas.conversations.anthropic import MessagesRequest

TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}


def parsed(*messages: dict[str, Any], **body: Any) -> MessagesRequest:
    said = {"model": "tiny", "max_tokens": 9, "messages": list(messages) or [USER], **body}
    return TypeAdapter(MessagesRequest).validate_python(said)


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


def test_formats_of_the_text_are_those_of_chat() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": {"type": "object"}},
    }
    assert parsed(output_config={"format": format})._asked()["response_format"] == expected
    assert parsed(output_format=format)._asked()["response_format"] == expected
    assert parsed()._asked()["response_format"] is None
