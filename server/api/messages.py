"""The fields of a conversation: messages and tools as clients send them and chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from server.api.conversations.tools import call_of, function_of
from server.api.fields import FIRST_ERROR, Body, Bounds, Flag, check_text
from server.errors import BadRequest
from server.model_facts import LIMITS

MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""The most parts of one message's content."""
MAX_TOOL_CALLS = 1024

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of content parts that are text; "refusal" has it under its own name."""

_EXAMPLE = '{"type": "text", "text": "..."}'

Template = dict[str, Any]
"""The type of a message as a template sees it."""


def _content(value: object) -> str | list[dict[str, str]] | None:
    """Reads a message's content. A union type would report one error for each of its members."""
    if value is None:
        return None
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, list):
        if len(value) > MAX_PARTS:
            raise PydanticCustomError(
                "too_long", "A content may have at most {most} parts", {"most": MAX_PARTS}
            )
        return [_text_part(part) for part in value]
    raise PydanticCustomError("content_type", "Input should be a string or a list of content parts")


def _text_part(part: object) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": check_text(part)}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError(
            "content_part", "A content part should be an object such as {example}", {"example": _EXAMPLE}
        )
    if kind not in TEXT_PARTS:
        raise PydanticCustomError(
            "content_part",
            "Content parts of type {kind} are not supported yet, only text is",
            {"kind": repr(kind[:64])},
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise PydanticCustomError("content_part", "The text of a content part should be a string")
    return {"type": "text", "text": check_text(text)}


Content = Annotated[
    str | list[dict[str, str]] | None,
    PlainValidator(_content, json_schema_input_type=str | list[dict[str, str]] | None),
]


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: object = Field(default=None, description="JSON as text, or the object itself.")


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    _of_custom = model_validator(mode="before")(call_of)


class Message(BaseModel):
    """One message. Fields beyond these are passed to the chat template, which may know them."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS), FIRST_ERROR] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part["text"] for part in self.content)
        return self.content or ""

    def for_template(self) -> Template:
        """The message without null fields, which mean the same as absent ones. Its content is a text."""
        fields = self.model_dump(exclude_none=True)
        fields.setdefault("content", "")
        if not self.tool_calls:
            fields.pop("tool_calls", None)
        return fields


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        default=None, description="Hold arguments to the schema, or refuse the request."
    )


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionTool
    is_custom: Flag = Field(default=False, description="Set by the server for tools of the type custom.")
    held_to: str | None = Field(
        default=None, description="Set by the server: the pattern of a custom tool's input."
    )
    is_told: Flag = Field(
        default=False, description="Set by the server for those with a grammar that is not enforced."
    )

    _of_custom = model_validator(mode="before")(function_of)

    def for_template(self) -> Template:
        return self.model_dump(exclude_none=True, exclude={"is_custom", "is_told", "held_to"})


def _with_contents(messages: list[Message]) -> list[Message]:
    for number, message in enumerate(messages):
        if message.content is None and message.role == "user":
            raise BadRequest(
                f"messages[{number}] has no content: a message of the user is a text, or a list of parts.",
                "messages",
            )
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES),
    FIRST_ERROR,
    AfterValidator(_with_contents),
]


class TemplateOptions(Body):
    """Fields that say how a conversation becomes a prompt, for chats and for counting their tokens."""

    bounds: ClassVar[Bounds] = {
        "tools": (LIMITS.tools, "tools"),
        "documents": (LIMITS.documents, "documents"),
        "chat_template_kwargs": (LIMITS.template_kwargs, "arguments"),
    }
    stand_ins: ClassVar[Mapping[str, object]] = dict.fromkeys(
        ("messages", "tools", "documents", "chat_template", "chat_template_kwargs")
    )

    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(
        default=None, description="Written into the prompt by the chat template."
    )
    documents: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = Field(
        default=False, description="The answer goes on with the last message."
    )
    chat_template: str | None = Field(default=None, description="Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_template_options(self) -> Self:
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )
        if self.tools == []:
            raise BadRequest(
                "`tools` must not be an empty array. "
                "Either provide at least one tool or omit the field entirely.",
                "tools",
            )
        return self
