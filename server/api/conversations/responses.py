"""The request body of POST /v1/responses, and what it asks for in the words of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from server.api.chat import ChatRequest
from server.api.conversations.response_input import (
    KEPT_NOWHERE,
    InputReader,
    Tools,
    read_tool_choice,
    read_tools,
)
from server.api.conversations.tools import MOST_NAMED, UNENFORCED
from server.api.conversations.transcript import chat_request, objects_of
from server.api.fields import FIRST_ERROR, MEANINGLESS, Body, Bounds, Flag, Neutral, Text
from server.api.shared_fields import NO_ENTRIES, Int64, Strings, Timeout
from server.errors import BadRequest
from server.model_facts import LIMITS

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
    "model",
    "temperature",
    "top_p",
    "stream",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "request_id",
    "timeout",
)
"""Fields that chat completions has under the same name."""


def _input(value: object) -> str | list[dict[str, Any]]:
    return value if isinstance(value, str) else objects_of(value, "input")


Input = Annotated[
    str | list[dict[str, Any]],
    PlainValidator(_input, json_schema_input_type=str | list[dict[str, Any]]),
]


class ReasoningOptions(Body):
    meaningless = frozenset({"summary", "generate_summary", "context", "mode"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Passed to the chat template."
    )


class TextOptions(Body):
    format: dict[str, Any] | None = Field(
        default=None, description='`{"type": "text"}`, `json_object`, or `json_schema` with its fields.'
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="Passed to the chat template."
    )


class ResponsesRequest(Body):
    """Nothing is kept: `store` is accepted, and each request brings its whole conversation."""

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
    }
    stand_ins = {"input": "-"}

    model: Text | None = Field(default=None, description="null is the served model.")
    input: Input
    instructions: Text | None = Field(default=None, description="A system message before the input.")
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = Field(
        default=None, description="Of the types function, custom and namespace."
    )
    tool_choice: object = Field(default=None, description="As in chat completions, but flat.")
    parallel_tool_calls: Flag | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    max_output_tokens: int | None = Field(default=None, description="null fills the context.")
    temperature: float | None = Field(
        default=None, description="0 is greedy. null: the checkpoint's default."
    )
    top_p: float | None = None
    top_logprobs: int | None = Field(
        default=None, description="Most likely tokens to report, if `include` asks for logprobs."
    )
    include: list[str] | None = Field(
        default=None, description="`message.output_text.logprobs` and `reasoning.encrypted_content`."
    )
    stream: Flag | None = False
    stream_options: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")

    store: Flag | None = Field(default=None, description="Accepted: nothing is kept, and answers say so.")
    background: Flag | None = Field(default=None, description="true is refused.")
    previous_response_id: str | None = Field(default=None, description="Refused: send the items again.")
    conversation: object = Field(default=None, description="Refused: send the items again.")
    prompt: object = Field(default=None, description="Refused: no prompts are kept.")
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto leaves out the oldest messages of a conversation that is too long."
    )
    max_tool_calls: int | None = Field(
        default=None, description="A bound on tools that the server runs, which has none."
    )
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

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

    @model_validator(mode="after")
    def check_response(self) -> Self:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise BadRequest(f"`{name}` cannot be continued, because {KEPT_NOWHERE}", name)
        if self.prompt is not None:
            raise BadRequest("`prompt` cannot be found: this server keeps none. Send its text.", "prompt")
        if self.background:
            raise BadRequest(
                "`background` is not supported: wait for the answer, or stream it.", "background"
            )
        for name in self.include or ():
            if name not in INCLUDED:
                raise BadRequest(
                    f"include: {name[:64]!r} is not one of {', '.join(sorted(INCLUDED))}.", "include"
                )
        return self

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

    @cached_property
    def _read(self) -> InputReader:
        reader = InputReader(self.known_tools.known_as)
        if self.instructions:
            reader.transcript.say("system", self.instructions)
        if isinstance(self.input, str):
            reader.transcript.say("user", self.input)
        else:
            for index, item in enumerate(self.input):
                reader.read(item, f"input[{index}]")
        if not reader.transcript.messages:
            raise BadRequest("`input` holds nothing to answer.", "input")
        return reader

    @property
    def warnings(self) -> list[str]:
        """What of the request has no effect though it could have."""
        causes = {
            "tools left out, which this server does not run": self.known_tools.left_out,
            UNENFORCED: self.known_tools.free,
            "items left out, which no model here reads": self._read.left_out,
        }
        return [f"{cause}: {', '.join(names[:MOST_NAMED])}" for cause, names in causes.items() if names]

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request to chat completions."""
        asked: dict[str, Any] = {name: getattr(self, name) for name in PASSED}
        asked["messages"] = self._read.transcript.messages
        asked["tools"] = self.known_tools.functions or None
        asked["tool_choice"] = read_tool_choice(self.tool_choice, self.known_tools)
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
        return chat_request(asked)


def _response_format(format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The format of the text, as chat completions nests it."""
    if format is None or format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {name: format[name] for name in format if name != "type"}}
