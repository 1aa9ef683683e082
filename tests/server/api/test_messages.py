"""Messages as clients send them, and as templates get them."""

from typing import Any

import pytest
from pydantic import ValidationError

from server.api.chat import ChatRequest
from server.api.messages import MAX_MESSAGES, Message, TemplateOptions, Tool


def template_of(**fields: Any) -> dict[str, Any]:
    return Message.model_validate({"role": "assistant", **fields}).for_template()


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_roles(role: str) -> None:
    assert Message(role=role).for_template() == {"role": role, "content": ""}  # pyright: ignore[reportArgumentType]


def test_another_role_is_refused() -> None:
    with pytest.raises(
        ValidationError, match="'system', 'developer', 'user', 'assistant', 'tool' or 'function'"
    ):
        Message.model_validate({"role": "hacker", "content": "a"})


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("a", "a"),
        (None, ""),
        ([{"type": "text", "text": "a"}], [{"type": "text", "text": "a"}]),
        (
            ["a", {"type": "input_text", "text": "b"}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ),
        ([{"type": "refusal", "refusal": "no"}], [{"type": "text", "text": "no"}]),
        (
            [{"type": "image_url", "image_url": {"url": "u", "detail": "high"}}],
            [{"type": "image_url", "image_url": "u"}],
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
            [{"type": "audio_url", "audio_url": "data:audio;base64,AA=="}],
        ),
        (
            [{"type": "input_image", "image_url": "u", "detail": "low", "uuid": "n"}],
            [{"type": "image_url", "image_url": "u", "uuid": "n", "detail": "low"}],
        ),
    ],
)
def test_content(content: object, seen: object) -> None:
    assert template_of(content=content)["content"] == seen


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (5, "a string or a list of content parts"),
        ([5], "A content part should be an object"),
        ([{"text": "a"}], "A content part should be an object"),
        ([{"type": "text"}], "should be a string"),
        ([{"type": "text", "text": None}], "should be a string"),
        ([{"type": "input_audio", "input_audio": {"url": "u"}}], "needs an object `input_audio`"),
        (
            [{"type": "input_audio", "uuid": "a", "audio_url": {"url": 5}}],
            "'input_audio' needs a URL in `input_audio`",
        ),
        (
            [{"type": "file"}],
            "type 'file' are not supported, text is, and of models that",
        ),
    ],
)
def test_content_that_cannot_be_read_is_one_error(content: object, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Message.model_validate({"role": "user", "content": content})
    [error] = refused.value.errors()
    assert error["loc"] == ("content",)
    assert message in error["msg"]


def test_what_the_sdk_sends_back_is_cleaned_of_nulls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    sent = {"content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": [call]}
    assert template_of(**sent) == {
        "role": "assistant",
        "content": "",
        "annotations": [],
        "tool_calls": [call],
    }
    assert "tool_calls" not in template_of(content="a", tool_calls=[])


def test_a_tool_result_names_its_call() -> None:
    result = Message.model_validate({"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"})
    assert result.for_template() == {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"}


def test_other_fields_reach_the_template() -> None:
    assert template_of(content="a", reasoning_content="b")["reasoning_content"] == "b"


def test_a_tool_keeps_what_the_client_wrote() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    function = {"name": "f", "description": "does f", "parameters": schema, "strict": True}
    assert Tool.model_validate({"function": function}).for_template() == {
        "type": "function",
        "function": function,
    }


@pytest.mark.parametrize("tool", [{}, {"type": "web_search"}, {"function": {}}, {"function": {"name": 1}}, 5])
def test_a_broken_tool(tool: object) -> None:
    with pytest.raises(ValidationError):
        TemplateOptions.model_validate({"tools": [tool]})


@pytest.mark.parametrize("count", [0, MAX_MESSAGES + 1])
def test_how_many_messages(count: int) -> None:
    with pytest.raises(ValidationError, match="List should have"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}] * count})
