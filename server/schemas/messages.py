"""The fields of a conversation: messages and tools as clients send them and chat templates read them, and
which tools may be called. A model calls a custom tool, whose input is free text, as a function of one string.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from server.errors import BadRequest
from server.grammars.lark_to_regex import NotRegular, regex_of
from server.media.media_parts import MEDIA_PARTS, ROWS, read_part, read_rows_part
from server.request_limits import LIMITS
from server.schemas.body import FIRST_ERROR, Body, Bounds, Flag, check_text, optional

INPUT = "input"
UNENFORCED = "grammars told to the model but not enforced"
"""What a client is told of the names of some custom tools."""
MOST_NAMED = 16
"""The most names that one warning has."""
_SYNTAXES = ("lark", "regex")


def function_of(tool: object) -> object:
    """A tool of the type custom as a function; any other as it is."""
    if not isinstance(tool, Mapping) or tool.get("type") != "custom":
        return tool
    return as_function(tool.get("custom"))


def as_function(custom: object) -> dict[str, Any]:
    """What `custom` describes, as a function that the model knows, and what the server has to know of it."""
    if not isinstance(custom, Mapping):
        raise BadRequest("A tool of the type custom should have an object `custom`.", "tools")
    function: dict[str, Any] = {"name": custom.get("name"), "parameters": _parameters(custom.get("format"))}
    if custom.get("description") is not None:
        function["description"] = custom["description"]
    held_to, is_told = _held_to(custom)
    return {
        "type": "function",
        "function": function,
        "is_custom": True,
        "is_told": is_told,
        "held_to": held_to,
    }


def held_schema(parameters: dict[str, Any], pattern: str | None) -> dict[str, Any]:
    """The schema of a custom tool's argument, whose input matches this pattern if there is one."""
    if pattern is None:
        return parameters
    text = {**parameters["properties"][INPUT], "pattern": pattern}
    return {**parameters, "properties": {INPUT: text}}


def call_of(call: object) -> object:
    """An earlier call of a custom tool as a call of its function; any other as it is."""
    if not isinstance(call, Mapping) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    custom = custom if isinstance(custom, Mapping) else {}
    arguments = json.dumps({INPUT: custom.get(INPUT, "")}, ensure_ascii=False)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": custom.get("name"), "arguments": arguments},
    }


def _held_to(custom: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The pattern of the input, and whether there is a grammar that the model is told but not held to.

    The pattern is not part of the schema that the model sees, which has the grammar.
    """
    grammar = (custom.get("format") or {}).get("grammar")
    if grammar is None:
        return None, False
    try:
        definition = grammar["definition"]
        regex = definition if grammar["syntax"] == "regex" else regex_of(definition)
        return f"^(?:{regex})$", False
    except NotRegular:
        return None, True


def _parameters(form: object) -> dict[str, Any]:
    """The schema of the one argument, as the model sees it: grammars are told in its description."""
    text: dict[str, Any] = {"type": "string", "description": "The input as it is."}
    if form is not None and not isinstance(form, Mapping):
        raise BadRequest("The `format` of a custom tool should be an object.", "tools")
    if form is not None and form.get("type") == "grammar":
        grammar = form.get("grammar")
        syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
        definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
        if syntax not in _SYNTAXES or not isinstance(definition, str):
            raise BadRequest(
                "The grammar of a custom tool has a `syntax`, lark or regex, and a `definition`.", "tools"
            )
        text["description"] += f" It follows this {syntax} grammar:\n{definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}


Mode = Literal["none", "auto", "required"]


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    mode: Mode = "auto"
    names: tuple[str, ...] = ()
    """The tools that may be called; all, if none is named."""
    is_named: bool = False
    """Whether the answer is one call of the one tool."""

    def check(self, tools: Collection[str]) -> None:
        """Refuse a choice that cannot be made among these tools."""
        if not tools and (self.mode == "required" or self.names):
            raise BadRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if missing := [name for name in self.names if name not in tools]:
            raise BadRequest(
                f"tool_choice names {missing[0][:64]!r}, which is not one of `tools`.", "tool_choice"
            )

    def allows(self, name: str) -> bool:
        return self.mode != "none" and (not self.names or name in self.names)


def read_tool_choice(choice: object) -> ToolChoice:
    """What a client has sent, in OpenAI's form. Raises BadRequest, which says what there is."""
    match choice:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(cast("Mode", choice))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            names = [name for tool in tools if (name := _name_in(tool)) is not None]
            if len(names) < len(tools) or not names:
                raise BadRequest("Each of `allowed_tools` names a tool.", "tool_choice")
            return ToolChoice(cast("Mode", mode), tuple(names))
        case _ if (name := _name_in(choice)) is not None:
            return ToolChoice("required", (name,), is_named=True)
        case _:
            raise BadRequest(
                "tool_choice is one of none, auto, required, or names a tool, as in "
                '{"type": "function", "function": {"name": "..."}}, or several, as '
                '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}.',
                "tool_choice",
            )


def _name_in(tool: object) -> str | None:
    """The name in a tool that a choice refers to."""
    if not isinstance(tool, Mapping):
        return None
    described: Mapping[str, Any] = tool
    kind = described.get("type")
    if kind not in ("function", "custom"):
        return None
    inside = described.get(kind, described)
    name = inside.get("name") if isinstance(inside, Mapping) else None
    return name if isinstance(name, str) else None


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
        return [read_content_part(part) for part in value]
    raise PydanticCustomError("content_type", "Input should be a string or a list of content parts")


def read_content_part(part: object) -> dict[str, str]:
    """A part of a content. Whether the model takes media is found out when its prompt is written."""
    if isinstance(part, str):
        return {"type": "text", "text": check_text(part)}
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind is None:  # the field of an item tells, as in vLLM
        kind = next((name for name in MEDIA_PARTS if name in part), None)
        part = {**part, "type": kind}
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError(
            "content_part", "A content part should be an object such as {example}", {"example": _EXAMPLE}
        )
    if kind in MEDIA_PARTS or kind == ROWS:
        try:
            return read_rows_part(part) if kind == ROWS else read_part(part)
        except BadRequest as error:
            raise PydanticCustomError("content_part", "{why}", {"why": error.message}) from None
    if kind not in TEXT_PARTS:
        raise PydanticCustomError(
            "content_part",
            "Content parts of type {kind} are not supported, text is, and of models that take media {media}",
            {"kind": repr(kind[:64]), "media": ", ".join(MEDIA_PARTS)},
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise PydanticCustomError("content_part", "The text of a content part should be a string")
    return {"type": "text", "text": check_text(text)}


Content = Annotated[
    str | list[dict[str, str]] | None,
    PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]] | None),
]


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: object = optional("JSON as text, or the object itself.")


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    _of_custom = model_validator(mode="before")(call_of)


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of messages for every model."""


def check_roles(messages: Sequence[Message], others: Iterable[int], words: Collection[str]) -> None:
    """Raises BadRequest if a message has a role that is none of the chat template's `words` either, as
    ipython is of Llama's and control of Granite's. `others`: which messages have a role that is not in ROLES.
    """
    for number in others:
        if (role := messages[number].role) not in words:
            where = f"body.messages.{number}.role"
            named = ", ".join(map(repr, ROLES[:-1]))
            raise BadRequest(f"{where}: should be {named} or {ROLES[-1]!r}, got {role[:64]!r}", where)


class Message(BaseModel):
    """One message. Fields beyond these are passed to the chat template, which may know them."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(description="system, developer, user, assistant, tool, or one that the template names.")
    content: Content = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS), FIRST_ERROR] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part["text"] for part in self.content if "text" in part)
        return self.content or ""

    def for_template(self) -> Template:
        """The message without null fields, which mean the same as absent ones."""
        fields = self.model_dump(exclude_none=True)
        fields.setdefault("content", "")
        if not self.tool_calls:
            fields.pop("tool_calls", None)
        return fields


def picture_alone(url: str) -> list[Message]:
    """The conversation of nothing but a picture."""
    return [Message(role="user", content=[{"type": "image_url", "image_url": url}])]


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = optional("Enforce the schema on arguments, or refuse the request.")


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionTool
    is_custom: Flag = Field(default=False, description="Set by the server for tools of the type custom.")
    held_to: str | None = optional("Set by the server: the pattern of a custom tool's input.")
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
        "mm_processor_kwargs": (LIMITS.template_kwargs, "settings"),
        "media_io_kwargs": (LIMITS.template_kwargs, "kinds"),
    }
    stand_ins: ClassVar[Mapping[str, object]] = dict.fromkeys(
        ("messages", "tools", "documents", "chat_template", "chat_template_kwargs")
    )

    tools: Annotated[list[Tool], FIRST_ERROR] | None = optional(
        "Written into the prompt by the chat template."
    )
    documents: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = Field(default=False, description="The answer continues the last message.")
    chat_template: str | None = optional("Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = optional(
        "Settings of the model's processor of media. Needs --trust-request-mm-kwargs."
    )
    media_io_kwargs: dict[str, dict[str, Any]] | None = optional(
        'How files are read, such as {"video": {"num_frames": 32}}. Needs --trust-request-mm-kwargs.'
    )

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
