"""The request and response bodies of POST /v2/chat, and what it asks for in the words of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from server.request_limits import LIMITS
from server.schemas.body import FIRST_ERROR, Body, Bounds, Flag, Text, optional
from server.schemas.chat import ChatRequest, Thinking
from server.schemas.conversations.transcript import chat_request
from server.schemas.messages import MAX_MESSAGES
from server.schemas.repaired_history import as_text, listed
from server.schemas.sampling_fields import NO_ENTRIES, Int64, Strings

Objects = Annotated[list[dict[str, Any]], FIRST_ERROR]

_SAME = (
    *("model", "tools", "stream", "temperature", "seed", "frequency_penalty", "presence_penalty", "logprobs"),
    *("thinking", "priority", "chat_template_kwargs", "cache_salt"),
)
"""Fields that chat completions has under the same name."""


class CohereFormat(Body):
    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = optional("The schema that the object must match.")


class CohereChatRequest(Body):
    """A conversation in Cohere's form. There are no citations."""

    meaningless = frozenset({"citation_options", "safety_mode"})
    bounds: ClassVar[Bounds] = {
        "messages": (MAX_MESSAGES, "messages"),
        "tools": (LIMITS.tools, "tools"),
        "documents": (LIMITS.documents, "documents"),
        "stop_sequences": (LIMITS.stop_strings, "strings"),
        "chat_template_kwargs": (LIMITS.template_kwargs, "arguments"),
    }
    client_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "top_p": "p",
        "top_k": "k",
        "enable_thinking": "thinking.type",
        "thinking_token_budget": "thinking.token_budget",
    }
    stand_ins: ClassVar[Mapping[str, object]] = {
        "messages": [{"role": "user", "content": "-"}],
        "documents": None,
    }

    model: Text | None = optional("null is the served model.")
    messages: Annotated[Objects, Field(min_length=1)]
    tools: Objects | None = None
    strict_tools: Flag = Field(False, description="Hold arguments of calls to the schemas of all tools.")
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | dict[str, Any]], FIRST_ERROR] | None = optional(
        "Passed to the chat template: texts, or the `data` and `id` of objects."
    )
    response_format: CohereFormat | None = None
    thinking: Thinking | None = optional("`type`, enabled or disabled, and `token_budget`.")
    max_tokens: int | None = optional("null fills the context.")
    stop_sequences: Strings = NO_ENTRIES
    stream: Flag | None = False
    temperature: float | None = optional("0 is greedy. null: the checkpoint's default.")
    p: float | None = optional("top_p of chat completions.")
    k: int | None = optional("top_k of chat completions.")
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: Flag | None = optional("Tell the logprobs of the tokens of texts and thinking.")
    priority: Int64 | None = None
    chat_template_kwargs: dict[str, Any] | None = optional("As in chat completions.")
    cache_salt: Text | None = optional("As in chat completions.")

    @property
    def plans(self) -> bool:
        """Whether what the model thinks is its plan for calls: where there are tools, and nothing is said of
        thinking."""
        return bool(self.tools) and self.tool_choice != "NONE" and self.thinking is None

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request to chat completions."""
        asked: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        asked["messages"] = list(map(_message, self.messages))
        asked |= {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        asked |= {"top_p": self.p, "top_k": self.k}
        asked["tool_choice"] = self.tool_choice and self.tool_choice.lower()
        if self.strict_tools:
            asked["tools"] = [_strict(tool) for tool in self.tools or ()] or None
        if self.documents:
            asked["documents"] = list(map(_document, self.documents))
        if (form := self.response_format) is not None:
            schema = {"name": "answer", "strict": True, "schema": form.json_schema}
            has_schema = form.json_schema is not None and form.type == "json_object"
            asked["response_format"] = (
                {"type": "json_schema", "json_schema": schema} if has_schema else {"type": form.type}
            )
        return chat_request(asked)


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return {**tool, "function": {**function, "strict": True}} if isinstance(function, dict) else tool


def _document(document: object) -> dict[str, Any]:
    """A document as templates read it."""
    match document:
        case {"data": dict(data), **rest}:
            return {**({"id": rest["id"]} if rest.get("id") else {}), **data}
        case dict():
            return document
        case _:
            return {"text": document}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat completions has it. What is wrong in one of the assistant is repaired later."""
    role, content = message.get("role"), message.get("content")
    if role == "tool" and isinstance(content, list):
        return {**message, "content": list(map(_tool_part, content))}
    if role != "assistant":
        return message
    said = {name: value for name, value in message.items() if name not in ("content", "citations")}
    parts = [] if content is None else listed(content)
    thoughts = [each["thinking"] for each in parts if isinstance(each, dict) and "thinking" in each]
    parts = [each for each in parts if not (isinstance(each, dict) and "thinking" in each)]
    said["content"] = content if isinstance(content, str) else parts or None
    if thinking := "".join(each for each in [*thoughts, said.get("tool_plan")] if isinstance(each, str)):
        said["reasoning_content"] = said["reasoning"] = thinking  # templates read one name or the other
    return said


def _tool_part(part: object) -> object:
    """A part of what a tool has answered: a document is told as JSON."""
    if isinstance(part, dict) and part.get("type") == "document":
        return {"type": "text", "text": as_text(_document(part.get("document")))}
    return part


class CohereAnswer(msgspec.Struct, kw_only=True):
    id: str
    finish_reason: str
    message: dict[str, Any]
    usage: dict[str, Any]
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
