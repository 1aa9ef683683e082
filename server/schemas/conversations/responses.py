"""The request body of POST /v1/responses, and what it asks for in the words of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import model_validator

from server.errors import BadRequest
from server.request_limits import LIMITS
from server.schemas.answer_form import Constraints
from server.schemas.body import (
    FIRST_ERROR,
    MEANINGLESS,
    Body,
    Bounds,
    Flag,
    Ids,
    Neutral,
    Text,
    check_repeated,
    optional,
)
from server.schemas.chat import ChatRequest
from server.schemas.conversations.response_input import InputReader, Tools, read_tool_choice, read_tools
from server.schemas.conversations.transcript import Transcript, chat_request, text_or_objects
from server.schemas.logprobs import ChatTokenLogprob
from server.schemas.sampling_fields import NO_ENTRIES, Int64, Strings, Timeout

MAX_ITEMS = 8192

INCLUDED = {
    "message.output_text.logprobs": True,
    "reasoning.encrypted_content": True,
    "code_interpreter_call.outputs": False,
    "computer_call_output.output.image_url": False,
    "file_search_call.results": False,
    "message.input_image.image_url": False,
    "web_search_call.action.sources": False,
    "web_search_call.results": False,
}
"""What `include` may name, and whether it has an effect: no answer here holds the others."""

PASSED = (
    "model", "temperature", "top_p", "stream", "seed", "stop", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "chat_template_kwargs", "priority", "cache_salt", "request_id",
    "timeout", "speculative_tokens", "structured_outputs", "logit_bias", "stop_token_ids", "ignore_eos",
)  # fmt: skip
"""Fields that chat completions has under the same name."""


class ReasoningOptions(Body):
    meaningless = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = optional(
        "Passed to the chat template."
    )


class TextOptions(Body):
    format: dict[str, Any] | None = optional(
        '`{"type": "text"}`, `json_object`, or `json_schema` with its fields.'
    )
    verbosity: Literal["low", "medium", "high"] | None = optional("Passed to the chat template.")


class ConversationOption(Body):
    id: str


class ResponsesRequest(Body):
    """A request brings its whole conversation, or names one that is kept (docs/responses.md)."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {
        "context_management": ([],),
        "moderation": (),
        "image": (),
        "access_programs": (),
        "background_options": (),
    }
    meaningless = MEANINGLESS | {"client_metadata", "prompt_cache_options"}
    bounds: ClassVar[Bounds] = {
        "input": (MAX_ITEMS, "items"),
        "tools": (LIMITS.tools, "tools"),
        "chat_template_kwargs": (LIMITS.template_kwargs, "arguments"),
        "stop": (LIMITS.stop_strings, "strings"),
        "metadata": (LIMITS.template_kwargs, "entries"),
        "logit_bias": (LIMITS.logit_bias, "entries"),
        "stop_token_ids": (LIMITS.stop_token_ids, "ids"),
    }
    other_names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
    }
    client_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "json_schema.schema": "schema",
        "json_schema.strict": "strict",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
        "messages": "input",
        "conversation_id": "conversation",
        "response_id": "previous_response_id",
    }
    stand_ins = {"input": "-"}

    model: Text | None = optional("null is the served model.")
    input: Annotated[str | list[dict[str, Any]], text_or_objects("input")]
    instructions: Text | None = optional("A system message before the input.")
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = optional(
        "Of the types function, custom and namespace."
    )
    tool_choice: object = optional("As in chat completions, but flat.")
    parallel_tool_calls: Flag | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    max_output_tokens: int | None = optional("null fills the context.")
    temperature: float | None = optional("0 is greedy. null: the checkpoint's default.")
    top_p: float | None = None
    top_logprobs: int | None = optional("Most likely tokens to report, if `include` asks for logprobs.")
    include: list[str] | None = optional("`message.output_text.logprobs` and `reasoning.encrypted_content`.")
    stream: Flag | None = False
    stream_options: dict[str, Any] | None = optional("Accepted without effect.")

    store: Flag | None = optional("false keeps nothing. With --response-store the default is true.")
    background: Flag | None = optional("true answers at once, and computes later.")
    previous_response_id: str | None = optional("The response that this one continues (--response-store).")
    conversation: str | ConversationOption | None = optional(
        "The conversation of /v1/conversations that this continues, and is added to."
    )
    prompt: object = optional("Refused: no prompts are kept.")
    truncation: Literal["auto", "disabled"] | None = optional(
        "auto leaves out the oldest messages of a conversation that is too long."
    )
    max_tool_calls: int | None = optional("A bound on tools that the server runs, which has none.")
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Text | None = optional("Repeated in the answer; equal prefixes are shared without it.")

    seed: Int64 | None = None
    stop: Strings = NO_ENTRIES
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Int64 | None = None
    cache_salt: Text | None = None
    request_id: str | None = None
    timeout: Timeout = None
    speculative_tokens: int | None = optional("As in chat completions.")
    structured_outputs: Constraints = optional("As in chat completions, in place of `text.format`.")
    logit_bias: dict[str, float] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: Flag | None = None

    @model_validator(mode="after")
    def check_response(self) -> Self:
        if self.conversation is not None and self.previous_response_id is not None:
            raise BadRequest(
                "`conversation` and `previous_response_id` both say what is continued. Give one of them.",
                "conversation",
            )
        if self.prompt is not None:
            raise BadRequest("`prompt` cannot be found: this server keeps none. Send its text.", "prompt")
        format = self.text and self.text.format
        check_repeated(self.metadata, self.user, self.safety_identifier, self.tools, self.tool_choice, format)
        for name in self.include or ():
            if name not in INCLUDED:
                raise BadRequest(
                    f"include: {name[:64]!r} is not one of {', '.join(sorted(INCLUDED))}.", "include"
                )
        return self

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationOption) else named

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def seals_reasoning(self) -> bool:
        """Whether reasoning comes in a form too that the client can send back."""
        return "reasoning.encrypted_content" in (self.include or ())

    @cached_property
    def known_tools(self) -> Tools:
        return read_tools(self.tools or [])

    def _read(self) -> Transcript:
        reader = InputReader()
        if self.instructions:
            reader.transcript.say("system", self.instructions)
        if isinstance(self.input, str):
            reader.transcript.say("user", self.input)
        else:
            for index, item in enumerate(self.input):
                reader.read(item, f"input[{index}]")
        if not reader.transcript.messages:
            raise BadRequest("`input` holds nothing to answer.", "input")
        return reader.transcript

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request to chat completions."""
        asked: dict[str, Any] = {name: getattr(self, name) for name in PASSED}
        transcript = self._read()
        asked["messages"] = transcript.messages
        asked["tools"] = self.known_tools.functions or None
        asked["tool_choice"] = read_tool_choice(self.tool_choice)
        asked["parallel_tool_calls"] = self.parallel_tool_calls
        asked["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            asked["reasoning_effort"] = self.reasoning.effort
        if self.text is not None:
            asked["verbosity"] = self.text.verbosity
            asked["response_format"] = _response_format(self.text.format)
        if self.wants_logprobs:
            # Each token as it comes, because the texts of an answer are told from the rest of it.
            asked.update(logprobs=True, top_logprobs=self.top_logprobs or 0, stream=True)
        return chat_request(asked, transcript.notes)


def _response_format(format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The format of the text, as chat completions nests it."""
    if format is None or format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {name: format[name] for name in format if name != "type"}}


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str


class OutputItem(msgspec.Struct, kw_only=True):
    """A message, a reasoning, a function call or a custom tool call; fields of the others are left out."""

    id: str
    type: str
    status: str
    role: str | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    content: list[OutputText] | list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    conversation: Mapping[str, str] | UnsetType | None = UNSET
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Mapping[str, Any]
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: Mapping[str, Any]
    tool_choice: object = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, Any] = {}


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of the whole response: that it was created, is in progress, or has ended in some way."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct, kw_only=True):
    """An event of one item: that it, or a part of it, begins, goes on or is done."""

    type: str
    sequence_number: int
    output_index: int
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    """The answer of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"
