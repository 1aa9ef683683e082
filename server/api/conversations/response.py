"""The answer of POST /v1/responses, and the events that it consists of when it is streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from server.api.logprobs import ChatTokenLogprob


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
