"""The request and response bodies of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from server.errors import BadRequest
from server.requests.sampling_params import SamplingParams
from server.requests.speculation_reports import AnswerMetrics
from server.schemas.body import MEANINGLESS, UNSUPPORTED, Bounds, Flag, optional
from server.schemas.logprobs import ChatLogprobs, PromptLogprobs
from server.schemas.messages import Messages, ToolChoice, read_tool_choice
from server.schemas.repaired_history import HistoryOptions
from server.schemas.sampling_fields import ChunkChoice, GenerationBody, ReasoningOptions, Usage
from server.text.chat_template import AnswerStyle, Verbosity


class ChatRequest(GenerationBody, HistoryOptions, ReasoningOptions):
    unsupported = {
        **UNSUPPORTED,
        "best_of": (1,),
        "modalities": (["text"],),
        "audio": (),
        "moderation": (),
        "functions": (),
        "function_call": ("none",),
        "web_search_options": (),
        "return_prompt_text": (False,),
    }
    meaningless = MEANINGLESS | {"prediction"}
    bounds: ClassVar[Bounds] = {**GenerationBody.bounds, **HistoryOptions.bounds}
    stand_ins: ClassVar[Mapping[str, object]] = {
        **HistoryOptions.stand_ins,
        "messages": [{"role": "user", "content": ""}],
    }

    messages: Messages
    max_completion_tokens: int | None = optional("null fills the context.")
    max_tokens: int | None = optional("The older name of max_completion_tokens.")
    logprobs: Flag | None = False
    top_logprobs: int | None = None
    add_special_tokens: Flag = Field(
        default=False, description="Chat templates write special tokens themselves."
    )
    tool_choice: object = optional(
        "none, auto (the default), required, a tool, or allowed tools. A required call is "
        "drawn in the model's own form under a grammar."
    )
    parallel_tool_calls: Flag | None = optional("false: an answer calls one tool at most.")
    verbosity: Verbosity | None = optional("Passed to the chat template, if that reads it.")

    @model_validator(mode="after")
    def check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        if self.tool_choice is not None:
            read_tool_choice(self.tool_choice)  # raises the error, if it is wrong
        if self.reasoning is not None or self.reasoning_budget is not None:
            self.read_reasoning()
        return self

    @property
    def choice(self) -> ToolChoice:
        """Whether the answer calls tools, and which."""
        return read_tool_choice(self.tool_choice)

    @property
    def style(self) -> AnswerStyle | None:
        """What is said of the manner of the answer, if anything is."""
        style = AnswerStyle(self.reasoning_effort, self.verbosity, self.enable_thinking, self.thinking_budget)
        return None if style == AnswerStyle() else style

    @property
    def most_tokens(self) -> int | None:
        """The longest answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def to_sampling(self) -> SamplingParams:
        return self.sampling(
            max_tokens=self.most_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class FunctionDelta(msgspec.Struct, kw_only=True):
    """A function that is called; in a stream, more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(msgspec.Struct, kw_only=True):
    """A custom tool that is called."""

    name: str | UnsetType = UNSET
    input: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A tool call of a message; in a stream, the beginning of one, or more of its arguments."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCallDelta] = []
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    """Changes with all that decides the bits of an answer: while it stays, a seed repeats its text."""
    usage: Usage
    metrics: AnswerMetrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET

    def spoken(self) -> str | None:
        """The reasoning in this delta, in whichever field it is; None if there is none."""
        for text in (self.reasoning, self.reasoning_content):
            if not isinstance(text, UnsetType):
                return text
        return None


_NOTHING = ChatDelta()


class ChatChunkChoice(ChunkChoice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET

    @property
    def is_empty(self) -> bool:
        if self.finish_reason is not None or self.logprobs is not None or self.delta != _NOTHING:
            return False
        return isinstance(self.token_ids, UnsetType) or not self.token_ids


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
