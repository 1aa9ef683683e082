"""The request body of POST /v1/messages, and what it asks for in the words of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from server.api.chat import ChatRequest
from server.api.conversations.anthropic_blocks import BlockReader, read_tools
from server.api.conversations.transcript import chat_request, objects_of
from server.api.fields import FIRST_ERROR, Body, Bounds, Flag, Neutral, Text
from server.api.messages import MAX_MESSAGES
from server.api.shared_fields import NO_ENTRIES, Strings
from server.errors import BadRequest
from server.model_facts import LIMITS


def _messages(value: object) -> list[dict[str, Any]]:
    found = objects_of(value, "messages")
    if not found:
        raise BadRequest("messages should hold at least one message.", "messages")
    return found


def _system(value: object) -> str | list[dict[str, Any]]:
    return value if isinstance(value, str) else objects_of(value, "system")


AnthropicMessages = Annotated[
    list[dict[str, Any]], PlainValidator(_messages, json_schema_input_type=list[dict[str, Any]])
]
System = Annotated[
    str | list[dict[str, Any]],
    PlainValidator(_system, json_schema_input_type=str | list[dict[str, Any]]),
]


class ThinkingOptions(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="The most tokens to think, with enabled."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: the thinking comes as a signature only. There are no summaries."
    )


class OutputConfig(Body):
    meaningless = frozenset({"task_budget"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Passed to the chat template as the reasoning effort."
    )
    format: dict[str, Any] | None = Field(
        default=None, description='`{"type": "json_schema", "schema": ...}`'
    )


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="The tool to call, with tool.")
    disable_parallel_tool_use: Flag = False


class MessagesInput(Body):
    """A conversation in Anthropic's form. Its headers are not read, but for the key in `x-api-key`."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {"container": (), "mcp_servers": ([],)}
    meaningless = frozenset(
        [
            "anthropic_beta",
            "anthropic_version",
            "betas",
            "cache_control",
            "context_management",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        ]
    )
    bounds: ClassVar[Bounds] = {
        "messages": (MAX_MESSAGES, "messages"),
        "system": (MAX_MESSAGES, "blocks"),
        "tools": (LIMITS.tools, "tools"),
        "stop_sequences": (LIMITS.stop_strings, "strings"),
    }
    stand_ins: ClassVar[Mapping[str, object]] = {
        "messages": [{"role": "user", "content": "-"}],
        "system": None,
    }

    model: Text = Field(description="A name of the served model.")
    messages: AnthropicMessages
    system: System | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = Field(
        default=None, description="Of the type custom."
    )
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(
        default=None, description="The older place of `output_config.format`."
    )

    @property
    def hides_thinking(self) -> bool:
        """Whether the thinking itself is not to be told."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @cached_property
    def _tools(self) -> tuple[list[dict[str, Any]], list[str]]:
        return read_tools(self.tools or [])

    @cached_property
    def _read(self) -> BlockReader:
        reader = BlockReader()
        if self.system is not None:
            reader.system(self.system, "system")
        for index, message in enumerate(self.messages):
            reader.message(message, f"messages[{index}]")
        return reader

    @property
    def warnings(self) -> list[str]:
        """What of the request has no effect though it could have."""
        causes = {
            "tools left out, which this server does not run": self._tools[1],
            "blocks left out, which no model here reads": self._read.left_out,
        }
        return [f"{cause}: {', '.join(names)}" for cause, names in causes.items() if names]

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request to chat completions."""
        return chat_request(self._asked())

    def _asked(self) -> dict[str, Any]:
        messages = self._read.transcript.messages
        asked: dict[str, Any] = {"model": self.model, "messages": messages, "tools": self._tools[0] or None}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and last.get("content") and "tool_calls" not in last:
            asked["continue_final_message"] = True
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
    temperature: float | None = Field(
        default=None, description="0 is greedy. null: the checkpoint's default."
    )
    top_p: float | None = None
    top_k: int | None = None

    def _asked(self) -> dict[str, Any]:
        return {
            **super()._asked(),
            "max_completion_tokens": max(1, self.max_tokens),
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def _response_format(format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The format of the text, as chat completions nests it. Anthropic's is always enforced."""
    if format is None or format.get("type") != "json_schema":
        return format
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": format.get("schema")},
    }
