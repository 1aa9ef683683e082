"""The request bodies of Ollama's API, and what they ask for in the words of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from server.errors import BadRequest
from server.media.media_parts import is_reference
from server.model_facts import Facts
from server.request_limits import LIMITS
from server.requests.pooling import PoolingParams, Source, Truncation, find_prompt
from server.schemas.body import FIRST_ERROR, Body, Bounds, Flag, Neutral, Text, optional
from server.schemas.chat import ChatRequest
from server.schemas.conversations.transcript import chat_request, goes_on, shown, text_of
from server.schemas.messages import MAX_MESSAGES
from server.schemas.ollama.options import OllamaOptions
from server.schemas.pooling_bodies import Inputs
from server.schemas.repaired_history import WRITTEN, listed, text_in
from server.schemas.sampling_fields import RequestTerms
from server.schemas.score_and_rerank import RerankRequest
from worker.protocol import Task

# Messages of Ollama's chats in the form of chat completions.


ROLES = ("system", "user", "assistant", "tool")

OpenCalls = dict[str, object]
"""The ids of calls that no tool has answered yet, with the names of their tools, in order."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All messages. What is wrong in those of a model and its tools is repaired later. Calls and what tools
    answer belong together by the tool's name and the order."""
    calls: OpenCalls = {}
    return [_message(message, f"messages[{index}]", calls) for index, message in enumerate(messages)]


def with_images(text: Any, images: Sequence[Any]) -> Any:
    """The content of a message with files in base64 or data URLs, which come before its text."""
    if not images:
        return text
    urls = [
        f"data:image;base64,{data}"
        if isinstance(data, str) and not (is_reference(data) or data.startswith("data:"))
        else data
        for data in images
    ]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _message(message: Mapping[str, Any], where: str, calls: OpenCalls) -> dict[str, Any]:
    role, content, images = message.get("role"), message.get("content") or "", message.get("images") or []
    if not isinstance(role, str):
        raise BadRequest(f"{where}.role is one of {', '.join(ROLES)}, got {shown(role)}.", where)
    if role not in WRITTEN:
        text_of(content, f"{where}.content")
        if not isinstance(images, list) or not all(isinstance(data, str) for data in images):
            raise BadRequest(f"{where}.images should be a list of files in base64.", f"{where}.images")
    said: dict[str, Any] = {"role": role, "content": with_images(content, listed(images))}
    if thinking := message.get("thinking"):
        # Templates read one name or the other.
        said["reasoning_content"] = said["reasoning"] = thinking
    if made := message.get("tool_calls"):
        said["tool_calls"] = [_call(call, where, calls) for call in listed(made)]
    if role == "tool":
        said |= _answered(message, calls)
    return said


def _call(call: Any, where: str, calls: OpenCalls) -> Any:
    """A call with an id by which a message of a tool can name it."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    id = text_in(call.get("id")) or f"call_{where}_{len(calls)}"
    calls[id] = function.get("name")
    return {**call, "id": id}


def _answered(message: Mapping[str, Any], calls: OpenCalls) -> dict[str, Any]:
    """Find the call that a message of a tool answers: the one that it names, or the first that is open."""
    name = message.get("tool_name") or message.get("name")
    named = (id for id, tool in calls.items() if tool == name or not name)
    id = text_in(message.get("tool_call_id")) or next(named, "")
    return {"tool_call_id": id, "name": calls.pop(id, name)}


class OllamaBody(Body):
    """Fields of all bodies that have the model compute."""

    model: Text = Field(min_length=1, description="A name of the served model, with or without `:latest`.")
    options: OllamaOptions | None = None
    keep_alive: object = optional(
        "0: one of several models is unloaded behind the answer. Else it stays while there is room."
    )

    @property
    def asked(self) -> OllamaOptions:
        return self.options or OllamaOptions()


class OllamaAnswering(OllamaBody):
    """Fields of both endpoints that generate."""

    meaningless = frozenset({"shift"})
    client_names: ClassVar[Mapping[str, str]] = {
        **OllamaOptions.client_names,
        "response_format": "format",
        "reasoning_effort": "think",
        "enable_thinking": "think",
    }

    format: object = optional('"json", or the JSON schema of the answer.')
    stream: Flag | None = optional("Lines of JSON as the answer grows, unless it is false.")
    think: Literal[True, False, "low", "medium", "high", "max"] | None = optional(
        "The switch of the chat template for thinking, or the reasoning effort."
    )
    truncate: Flag | None = optional(
        "Leave out the oldest messages of a conversation that is too long, unless it is false."
    )
    logprobs: Flag | None = None
    top_logprobs: int | None = optional("Without effect unless `logprobs` is true.")

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request to chat completions."""
        return chat_request(self._asked())

    def _asked(self) -> dict[str, Any]:
        asked = self.asked.as_ours()
        asked |= {"model": self.model, "stream": self.stream is not False}
        asked |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs if self.logprobs else None}
        asked["response_format"] = _response_format(self.format)
        asked["enable_thinking" if isinstance(self.think, bool) else "reasoning_effort"] = self.think
        return asked


def _response_format(format: object) -> dict[str, Any] | None:
    if format is None or format == "":
        return None
    if format == "json":
        return {"type": "json_object"}
    if not isinstance(format, dict):
        raise BadRequest('`format` is "json" or a JSON schema.', "format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format}}


class OllamaChatRequest(OllamaAnswering):
    bounds: ClassVar[Bounds] = {"messages": (MAX_MESSAGES, "messages"), "tools": (LIMITS.tools, "tools")}
    stand_ins: ClassVar[Mapping[str, object]] = {"messages": [{"role": "user", "content": "-"}]}

    messages: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None

    def _asked(self) -> dict[str, Any]:
        messages = read_messages(self.messages or [])
        return {
            **super()._asked(),
            "messages": messages,
            "tools": self.tools or None,
            "continue_final_message": goes_on(messages),
        }


class OllamaGenerateRequest(OllamaAnswering):
    unsupported: ClassVar[Mapping[str, Neutral]] = {"template": ("",), "context": ([],)}
    stand_ins: ClassVar[Mapping[str, object]] = {
        "prompt": "-",
        "suffix": None,
        "system": None,
        "images": None,
    }

    prompt: Text | None = None
    suffix: Text | None = optional(
        "The text behind the place that the answer fills; the prompt is before it."
    )
    system: Text | None = optional("A system message before the prompt.")
    images: Annotated[list[Text], FIRST_ERROR] | None = optional("Files in base64.")
    raw: Flag | None = optional("true: the prompt is read as it is, without the chat template.")

    def _asked(self) -> dict[str, Any]:
        if (self.raw or self.suffix) and (self.images or self.system):
            name = "raw" if self.raw else "suffix"
            raise BadRequest(f"`images` and `system` need the chat template: leave `{name}` out.", name)
        said = {"role": "user", "content": with_images(self.prompt or "", self.images or [])}
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {**super()._asked(), "messages": [*system, said]}
        if (self.raw or self.suffix) and not self.think and asked["response_format"]:
            # No template opens reasoning, and so the form begins with the first token, as in Ollama.
            asked["separate_reasoning"] = False
        return asked


class OllamaEmbedRequest(OllamaBody):
    stand_ins: ClassVar[Mapping[str, object]] = {"input": "-"}
    texts_field: ClassVar[str] = "input"

    input: Inputs = optional("A text or several.")
    truncate: Flag | None = optional("Cut a text that is too long, unless it is false.")
    dimensions: int | None = None

    @property
    def terms(self) -> RequestTerms:
        return RequestTerms(self.model)

    @field_validator("input", mode="before")
    @classmethod
    def read_nothing(cls, value: object) -> object:
        """Reads the empty text alone as none: Ollama's client sends it to have a model loaded."""
        return None if value == "" else value

    @property
    def sources(self) -> list[Source]:
        return self.input or []

    def truncation(self, facts: Facts) -> Truncation:
        most = self.asked.window(facts.max_text_len)
        return Truncation(None if self.truncate is False else most, left=False)

    def prompt(self, task: Task, facts: Facts) -> str:
        """The instruction that is written before each text."""
        return find_prompt(None, facts)

    def params(self) -> PoolingParams:
        """Vectors have the length 1, as Ollama's have."""
        return PoolingParams(task="embed", use_activation=True, dimensions=self.dimensions)


class OllamaEmbeddingsRequest(OllamaEmbedRequest):
    """The older body, whose one text is in `prompt`. Its vector is as the model makes it."""

    texts_field = "prompt"
    other_names = {"prompt": "input"}

    @property
    def sources(self) -> list[Source]:
        found = super().sources
        if len(found) > 1:
            raise BadRequest("`prompt` is one text; /api/embed takes several.", "prompt")
        return found

    def params(self) -> PoolingParams:
        return PoolingParams(task="embed")


class OllamaRerankRequest(RerankRequest):
    meaningless = RerankRequest.meaningless | {"keep_alive", "options"}


class OllamaShowRequest(Body):
    meaningless = frozenset({"options", "system", "template", "verbose"})

    model: Text | None = None
    name: Text | None = optional("The older name of `model`.")


class OllamaPullRequest(OllamaShowRequest):
    meaningless = frozenset({"insecure"})

    stream: Flag | None = optional("Lines of JSON, unless it is false.")
