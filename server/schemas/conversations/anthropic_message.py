"""The answer of POST /v1/messages, and the events that it consists of when it is streamed."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Block(msgspec.Struct, kw_only=True):
    """A text, a thinking or a use of a tool, or more of one; fields of the others are left out."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Tokens of the prompt that were not found in the prefix cache."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class Stop(msgspec.Struct, kw_only=True):
    """Why an answer has ended."""

    stop_reason: str
    stop_sequence: str | None = None


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event of a message or of one of its blocks; fields of the others are left out."""

    type: str
    message: AnthropicMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: Block | Stop | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int
