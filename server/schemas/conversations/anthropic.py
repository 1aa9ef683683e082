"""The request body of POST /v1/messages, and what it asks for in the words of chat completions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo

from server.errors import BadRequest
from server.media.media_parts import is_reference
from server.request_limits import LIMITS
from server.schemas.body import FIRST_ERROR, Body, Bounds, Flag, Neutral, Text, optional
from server.schemas.chat import ChatRequest
from server.schemas.conversations.transcript import (
    Content,
    Transcript,
    chat_request,
    goes_on,
    objects_of,
    shown,
    text_of,
    text_or_objects,
    unsealed,
)
from server.schemas.messages import MAX_MESSAGES
from server.schemas.repaired_history import listed
from server.schemas.sampling_fields import NO_ENTRIES, Strings
from server.schemas.unknown_fields import note_name


def _messages(value: object) -> list[dict[str, Any]]:
    found = objects_of(value, "messages")
    if not found:
        raise BadRequest("messages should hold at least one message.", "messages")
    return found


AnthropicMessages = Annotated[
    list[dict[str, Any]], PlainValidator(_messages, json_schema_input_type=list[dict[str, Any]])
]
System = Annotated[str | list[dict[str, Any]], text_or_objects("system")]


class ThinkingOptions(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = optional(
        "Maximum number of tokens of thinking, with enabled."
    )
    display: Literal["summarized", "omitted"] | None = optional(
        "omitted: the thinking comes as a signature only. There are no summaries."
    )


class OutputConfig(Body):
    meaningless = frozenset({"task_budget"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = optional(
        "Passed to the chat template as the reasoning effort."
    )
    format: dict[str, Any] | None = optional('`{"type": "json_schema", "schema": ...}`')


def _named(format: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    note_name(info.context, "output_config.format", "output_format")
    return format


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = optional("The tool to call, with tool.")
    disable_parallel_tool_use: Flag = False


class MessagesInput(Body):
    """A conversation in Anthropic's form. Its headers are not read, but for the key in `x-api-key`."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {"container": (), "mcp_servers": ([],), "thread": ()}
    meaningless = frozenset(
        {
            "anthropic_beta", "anthropic_version", "betas", "cache_control", "context_management",
            "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id",
            "workspace_id",
        }
    )  # fmt: skip
    bounds: ClassVar[Bounds] = {
        "messages": (MAX_MESSAGES, "messages"),
        "system": (MAX_MESSAGES, "blocks"),
        "tools": (LIMITS.tools, "tools"),
        "stop_sequences": (LIMITS.stop_strings, "strings"),
        "chat_template_kwargs": (LIMITS.template_kwargs, "arguments"),
    }
    client_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "json_schema.schema": "schema",
        "reasoning_effort": "output_config.effort",
        "enable_thinking": "thinking.type",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    stand_ins: ClassVar[Mapping[str, object]] = {
        "messages": [{"role": "user", "content": "-"}],
        "system": None,
    }

    model: Text = Field(description="A name of the served model.")
    messages: AnthropicMessages
    system: System | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = optional("Of the type custom.")
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[dict[str, Any], AfterValidator(_named)] | None = optional(
        "The older place of `output_config.format`."
    )
    chat_template_kwargs: dict[str, Any] | None = optional("As in chat completions.")
    cache_salt: Text | None = optional("As in chat completions.")

    @property
    def hides_thinking(self) -> bool:
        """Whether the thinking itself is not to be told."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request to chat completions."""
        reader = BlockReader()
        if self.system is not None:
            reader.system(self.system, "system")
        for index, message in enumerate(self.messages):
            reader.message(message, f"messages[{index}]")
        messages = reader.transcript.messages
        asked = {**self._asked(), "messages": messages, "continue_final_message": goes_on(messages)}
        return chat_request(asked, reader.transcript.notes)

    def _asked(self) -> dict[str, Any]:
        tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or [])]
        asked: dict[str, Any] = {"model": self.model, "tools": tools or None}
        asked |= {"chat_template_kwargs": self.chat_template_kwargs, "cache_salt": self.cache_salt}
        if self.tool_choice is not None:
            asked["tool_choice"] = self._choice(self.tool_choice)
            asked["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None and self.thinking.type != "adaptive":
            asked["enable_thinking"] = self.thinking.type == "enabled"
            asked["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config is not None:
            asked["reasoning_effort"] = self.output_config.effort
        format = self.output_config.format if self.output_config else None
        asked["response_format"] = _response_format(self.output_format if format is None else format)
        return asked

    def _choice(self, choice: ToolChoice) -> object:
        if choice.type == "tool":
            return {"type": "function", "function": {"name": choice.name or ""}}
        return "required" if choice.type == "any" else choice.type


class CountTokensRequest(MessagesInput):
    """A conversation whose tokens are to be counted."""

    meaningless = MessagesInput.meaningless | {"max_tokens", "stop_sequences", "stream"}


class MessagesRequest(MessagesInput):
    max_tokens: Annotated[int, Field(ge=0)] = Field(
        description="More than the window holds is as much as it holds. 0 reads the prompt into the cache "
        "and answers nothing."
    )
    stop_sequences: Strings = NO_ENTRIES
    stream: Flag | None = False
    temperature: float | None = optional("0 is greedy. null: the checkpoint's default.")
    top_p: float | None = None
    top_k: int | None = None
    speculative_tokens: int | None = optional("As in chat completions.")

    def _asked(self) -> dict[str, Any]:
        return {
            **super()._asked(),
            "max_completion_tokens": max(1, self.max_tokens),
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "speculative_tokens": self.speculative_tokens,
        }


def _response_format(format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The format of the text, as chat completions nests it. Anthropic's is always enforced."""
    if format is None or format.get("type") != "json_schema":
        return format
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": format.get("schema")},
    }


BILLING = "x-anthropic-billing-header:"
"""The beginning of a block of Claude Code that differs in each request: with it no prompt would be cached."""

ROLES = ("user", "assistant", "system")

_NOT_READ = re.compile("(server|mcp)_tool_use|.*_tool_result|redacted_thinking|compaction|container_upload")
"""Types of blocks that only Anthropic's own models and tools make: left out, also of what users say."""


class BlockReader:
    """Reads messages one after the other. What is wrong in one of the assistant is repaired later."""

    def __init__(self) -> None:
        self.transcript = Transcript("blocks")

    def system(self, content: object, where: str) -> None:
        """Read what the system says."""
        if isinstance(content, str):
            said: Content = content
        else:
            texts = [_text(block, f"{where}[{i}]") for i, block in enumerate(objects_of(content, where))]
            said = [{"type": "text", "text": text} for text in texts if not text.startswith(BILLING)]
        if said:
            self.transcript.say("system", said)

    def message(self, message: Mapping[str, Any], where: str) -> None:
        """Read one message, which is `where` in the request."""
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRequest(f"{where}.role is one of {', '.join(ROLES)}, got {shown(role)}.", where)
        if role == "system":
            self.system(content, f"{where}.content")
        elif isinstance(content, str):
            self.transcript.say(role, content)
        elif role == "assistant":
            blocks = [
                each if isinstance(each, dict) else {"type": "text", "text": each} for each in listed(content)
            ]
            self._blocks(role, blocks, f"{where}.content")
        else:
            self._blocks(role, objects_of(content, f"{where}.content"), f"{where}.content")

    def _blocks(self, role: str, blocks: Sequence[dict[str, Any]], where: str) -> None:
        said: list[dict[str, Any]] = []

        def say() -> None:
            if said:
                self.transcript.say(role, said.copy())
                said.clear()

        for index, block in enumerate(blocks):
            place, kind = f"{where}[{index}]", _kind(block, role)
            if kind == "tool_result":
                say()
                content = block.get("content")
                shown = list(map(_written, content)) if isinstance(content, list) else content
                self.transcript.answer(block.get("tool_use_id"), shown or "")
            elif kind == "thinking":
                say()
                text = block.get("thinking")
                said_before = text if isinstance(text, str) and text else unsealed(block.get("signature"))
                self.transcript.think(said_before)
            elif kind == "tool_use":
                say()
                self.transcript.call(block.get("id"), block.get("name"), block.get("input"))
            elif kind in ("text", "document", "image"):
                said.append(_written(block) if role == "assistant" else _said(block, place))
            elif kind and (role == "assistant" or _NOT_READ.fullmatch(kind)):
                if kind != "redacted_thinking":
                    self.transcript.leave_out(kind)
            elif role == "assistant":
                said.append(block)
            else:
                raise _refused(kind, place, role)
        say()


def _kind(block: Mapping[str, Any], role: str) -> str:
    """The type of a block; where that is none that is known, the one that its fields show."""
    kind = block.get("type")
    known = kind if isinstance(kind, str) else ""
    if "tool_use_id" in block and not (role == "assistant" and known) and not _NOT_READ.fullmatch(known):
        return "tool_result"
    return "tool_use" if not known and "input" in block else known


def _written(block: Any) -> Any:
    """A block that a model or a tool has written. One that has no form in chat completions stays as it is."""
    try:
        return _said(block, "") if isinstance(block, dict) else block
    except BadRequest:
        return block


def _said(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A text or an image as chat completions has it."""
    match block:
        case {"type": "image", "source": {"type": "base64", "data": str(data), **rest}}:
            kind = rest.get("media_type")
            url = data if is_reference(data) else f"data:{shown(kind)[1:-1]};base64,{data}"
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            pass
        case {"type": "image"}:
            raise BadRequest(
                f"{where}.source of an image should have the type base64 and `data`, or url and `url`.", where
            )
        case _:
            return {"type": "text", "text": _text(block, where)}
    return {"type": "image_url", "image_url": url}


def _text(block: Mapping[str, Any], where: str) -> str:
    """The text of a block that has nothing else."""
    match block:
        case {"type": "text", "text": text}:
            return text_of(text, f"{where}.text")
        case {"type": "document", "source": {"type": "text", "data": text}}:
            return text_of(text, f"{where}.source.data")
        case {"type": "tool_reference", "tool_name": name}:
            return text_of(name, f"{where}.tool_name")
        case _:
            raise _refused(block.get("type"), where, "message")


def _refused(kind: object, where: str, role: str) -> BadRequest:
    return BadRequest(
        f"{where}: blocks of the type {shown(kind)} are not supported in the content of a {role}; text and "
        "image are, and where they belong tool_use, tool_result and thinking. Sounds are parts in "
        "/v1/chat/completions and /v1/responses.",
        where,
    )


def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A tool as chat completions has it. One of another type stays as it is, and is left out later."""
    if isinstance(kind := tool.get("type"), str) and kind != "custom":
        return tool
    function: dict[str, Any] = {"name": text_of(tool.get("name"), f"{where}.name")}
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema should be an object.", f"{where}.input_schema")
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {"type": "function", "function": {**function, "parameters": schema}}
