"""The answer of POST /v1/messages, and the events that it consists of when it is streamed."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Block(msgspec.Struct, kw_only=True):
    """A text, a thinking or a use of a tool; fields of the others are left out."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class BlockDelta(msgspec.Struct, kw_only=True):
    """More of a block."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
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
    stop_sequence: str | None


class MessageStart(msgspec.Struct, kw_only=True, tag="message_start"):
    message: AnthropicMessage


class BlockStart(msgspec.Struct, kw_only=True, tag="content_block_start"):
    index: int
    content_block: Block


class BlockMore(msgspec.Struct, kw_only=True, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(msgspec.Struct, kw_only=True, tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, kw_only=True, tag="message_delta"):
    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag="ping"):
    pass


Event = MessageStart | BlockStart | BlockMore | BlockStop | MessageDelta | MessageStop | Ping


class TokenCount(msgspec.Struct):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int
