"""Bodies of POST /v1/responses in the words of chat completions, and what is refused of them."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from server.schemas.conversations.response_input import read_tool_choice
from server.schemas.conversations.responses import ResponsesRequest
from server.schemas.conversations.transcript import unsealed


def parsed(**body: Any) -> ResponsesRequest:
    return TypeAdapter(ResponsesRequest).validate_python({"input": "hi", **body})


def messages(*items: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in parsed(input=list(items), **body).chat.messages]


@pytest.mark.parametrize("content", [None, 1, "gAAAAAB", "facet1.ä", "facet1.%%", "facet1./w=="])
def test_what_others_have_sealed_is_empty(content: object) -> None:
    assert unsealed(content) == ""


def test_choices_of_tools_are_those_of_chat() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    look = {"type": "function", "name": "look"}
    assert read_tool_choice("required") == "required"
    assert read_tool_choice(look) == read_tool_choice({**look, "type": "custom"}) == named
    inside = read_tool_choice({**look, "namespace": "crm"})
    assert inside == {"type": "function", "function": {"name": "crm__look"}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [look, {"type": "web_search"}]}
    assert read_tool_choice(allowed) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [named]},
    }


def test_reasoning_in_many_items_is_joined_once() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 300}]}
    said = messages(*[item] * 8000, {"role": "user", "content": "a"})
    assert len(said) == 2 and said[0]["reasoning"] == "x" * 300 * 8000
