"""Messages as clients send them, and as templates get them."""

from typing import Any

import pytest
from pydantic import ValidationError

from server.schemas.chat import ChatRequest
from server.schemas.messages import MAX_MESSAGES, Message, Tool


def template_of(**fields: Any) -> dict[str, Any]:
    return Message.model_validate({"role": "assistant", **fields}).for_template()


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_roles(role: str) -> None:
    assert Message(role=role).for_template() == {"role": role, "content": ""}  # pyright: ignore[reportArgumentType]


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


def test_a_tool_keeps_what_the_client_wrote() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    function = {"name": "f", "description": "does f", "parameters": schema, "strict": True}
    assert Tool.model_validate({"function": function}).for_template() == {
        "type": "function",
        "function": function,
    }


@pytest.mark.parametrize("count", [0, MAX_MESSAGES + 1])
def test_how_many_messages(count: int) -> None:
    with pytest.raises(ValidationError, match="List should have"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}] * count})
