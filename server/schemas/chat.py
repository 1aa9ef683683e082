"""The request and response bodies of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema

from server.errors import BadRequest
from server.request_limits import LIMITS
from server.requests.sampling_params import SamplingParams
from server.requests.speculation_reports import AnswerMetrics
from server.schemas.body import FIRST_ERROR, MEANINGLESS, UNSUPPORTED, Body, Bounds, Flag, optional
from server.schemas.logprobs import ChatLogprobs, PromptLogprobs
from server.schemas.messages import Messages, ToolChoice, read_tool_choice
from server.schemas.repaired_history import HistoryOptions
from server.schemas.sampling_fields import (
    FILLS_CONTEXT,
    Budget,
    BudgetOptions,
    ChunkChoice,
    GenerationBody,
    Usage,
)
from server.schemas.unknown_fields import note_name
from server.schemas.vendor_bodies.foreign_fields import CHAT_FIELDS, GENERATION_NAMES
from server.text.chat_template import SWITCHES, AnswerStyle, Effort, Verbosity


class Reasoning(Body):
    """OpenRouter's object."""

    effort: Effort | None = None
    max_tokens: Budget | None = None
    exclude: Flag | None = None
    enabled: Flag | None = None


class Thinking(Body):
    """Anthropic's object, which other APIs have taken over."""

    other_names = {"budget": "budget_tokens", "token_budget": "budget_tokens"}

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


_SWITCH = {"enabled": True, "disabled": False}


class ReasoningOptions(BudgetOptions):
    include_reasoning: Flag = Field(default=True, description="Answer with the reasoning too.")
    reasoning_effort: Effort | None = optional(
        "Passed to the chat template, if that reads it; none switches thinking off where the "
        "template has a switch, and all others switch it on."
    )
    enable_thinking: Flag | None = optional("The template's switch for thinking, whatever its name there.")
    reasoning: Reasoning | None = optional(
        "OpenRouter's object: `effort` is reasoning_effort, `max_tokens` thinking_token_budget, "
        "`exclude: true` is include_reasoning: false, and `enabled` is enable_thinking."
    )
    thinking: Thinking | None = optional(
        "Anthropic's object: `type` is enable_thinking, and `budget_tokens` thinking_token_budget."
    )
    separate_reasoning: Flag = Field(
        default=True, description="false: the reasoning stays in the content, as the model wrote it."
    )

    def read_reasoning(self) -> None:
        """Puts what was said under other names where ours have it."""
        told = self.reasoning or Reasoning()
        self._take("reasoning_effort", "reasoning.effort", told.effort)
        self._take("enable_thinking", "reasoning.enabled", told.enabled)
        self._take("thinking_token_budget", "reasoning.max_tokens", told.max_tokens)
        if self.thinking is not None:
            self._take("enable_thinking", "thinking.type", _SWITCH.get(self.thinking.type))
            self._take("thinking_token_budget", "thinking.budget_tokens", self.thinking.budget_tokens)
        if told.exclude:
            self.include_reasoning = False
        self.reasoning = self.thinking = None

    def _take(self, field: str, name: str, value: object) -> None:
        """Raises BadRequest if the field says something else than its other name."""
        if value is None:
            return
        if getattr(self, field) not in (None, value):
            raise BadRequest(f"`{name}` and `{field}` say different things. Give one of them.", name)
        setattr(self, field, value)


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
    other_names = GENERATION_NAMES
    foreign = CHAT_FIELDS
    bounds: ClassVar[Bounds] = {**GenerationBody.bounds, **HistoryOptions.bounds}
    stand_ins: ClassVar[Mapping[str, object]] = {
        **HistoryOptions.stand_ins,
        "messages": [{"role": "user", "content": ""}],
    }

    messages: Messages
    max_completion_tokens: int | None = optional("null and -1 fill the context.")
    max_tokens: int | None = optional("The older name of max_completion_tokens.")
    logprobs: Flag | None = False
    top_logprobs: int | None = None
    add_special_tokens: Flag = Field(
        default=False, description="Chat templates write special tokens themselves."
    )
    tool_choice: object = optional(
        "none, auto (the default), required, a tool, or allowed tools. A grammar makes "
        "the model write a required call, in its own format."
    )
    parallel_tool_calls: Flag | None = optional("false: an answer calls one tool at most.")
    verbosity: Verbosity | None = optional("Passed to the chat template, if that reads it.")

    @model_validator(mode="after")
    def check_chat(self, info: ValidationInfo) -> Self:
        if self.max_completion_tokens is not None:
            note_name(info.context, "max_tokens", "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        if self.tool_choice is not None:
            read_tool_choice(self.tool_choice)  # raises the error, if it is wrong
        if self.reasoning is not None or self.thinking is not None:
            self.read_reasoning()
        return self

    @property
    def choice(self) -> ToolChoice:
        """Whether the answer calls tools, and which."""
        return read_tool_choice(self.tool_choice)

    @property
    def several_calls(self) -> bool:
        """Whether an answer may have more than one call."""
        return self.parallel_tool_calls is not False and not self.choice.is_named

    @property
    def may_be_told(self) -> bool:
        """Whether tools may be described in text: the client's own template shows them itself."""
        return self.chat_template is None or self.choice.mode == "required"

    @property
    def may_think(self) -> bool:
        """Whether the model may think by itself: False where the request switches it off."""
        said = self.chat_template_kwargs or {}
        switched = next((said[name] for name in SWITCHES if name in said), self.enable_thinking)
        return self.reasoning_effort != "none" if switched is None else switched is not False

    @property
    def style(self) -> AnswerStyle | None:
        """What is said of the manner of the answer, if anything is."""
        style = AnswerStyle(self.reasoning_effort, self.verbosity, self.enable_thinking, self.thinking_budget)
        return None if style == AnswerStyle() else style

    @property
    def most_tokens(self) -> int | None:
        """The longest answer."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if asked == FILLS_CONTEXT else asked

    def to_sampling(self) -> SamplingParams:
        return self.sampling(
            max_tokens=self.most_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class BatchChatRequest(ChatRequest):
    """`messages` is a list of conversations, which are answered side by side."""

    bounds: ClassVar[Bounds] = {**ChatRequest.bounds, "conversations": (LIMITS.prompts, "conversations")}
    stand_ins: ClassVar[Mapping[str, object]] = {
        **ChatRequest.stand_ins,
        "conversations": [[{"role": "user", "content": ""}]],
    }
    client_names = {"conversations": "messages"}

    conversations: Annotated[list[Messages], FIRST_ERROR, Field(min_length=1)] = []

    @model_validator(mode="before")
    @classmethod
    def divide(cls, body: object) -> object:
        if not isinstance(body, dict) or "conversations" in body:
            return body
        given = body.get("messages")
        if not isinstance(given, list) or not given or not isinstance(given[0], list):
            raise BadRequest("`messages` is a list of conversations, each a list of messages.", "messages")
        return {**body, "conversations": given, "messages": cls.stand_ins["messages"]}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describes the conversations under the name that clients have for them."""
        found = super().__get_pydantic_json_schema__(schema, handler)
        found["properties"]["messages"] = found["properties"].pop("conversations")
        return found

    @model_validator(mode="after")
    def check_batch(self) -> Self:
        for name in ("stream", "tools", "use_beam_search", "echo", "prompt_logprobs"):
            if getattr(self, name):
                raise BadRequest(f"`{name}` is for one conversation: ask /v1/chat/completions.", name)
        if self.shown != 1:
            raise BadRequest("`n` is 1 where several conversations are answered.", "n")
        return self


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
