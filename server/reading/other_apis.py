"""Conversations of Responses, Messages and Ollama: how they become prompts, and how tokens are counted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol, TypeVar

from server.errors import BadRequest
from server.reading.infill import write_infill
from server.reading.prompts import Conversation, encode_conversation, read_chat, read_raw, write_chat
from server.reading.reading_context import ReadingContext
from server.reading.system_messages import arranged
from server.schemas.chat import ChatRequest
from server.schemas.conversations.responses import ResponsesRequest
from server.schemas.ollama.requests import OllamaAnswering, OllamaGenerateRequest

R = TypeVar("R")

_TOO_LONG = ("input_text", "input_tokens", "prompt")
"""The parameters that errors name of prompts which are too long for the model."""


class Asks(Protocol):
    """A body that can be said in the words of chat completions."""

    @property
    def chat(self) -> ChatRequest: ...


def read_messages(body: Asks, context: ReadingContext) -> Conversation:
    return _read_continued(_arranged(body.chat, context), lambda chat: read_chat(chat, context))


def read_response(body: ResponsesRequest, context: ReadingContext) -> Conversation:
    chat = _arranged(body.chat, context)
    most = context.facts.max_model_len if body.truncation == "auto" else None
    return _read_fitting(chat, context, most)


def _read_continued(chat: ChatRequest, read: Callable[[ChatRequest], R]) -> R:
    """Reads a conversation whose answer goes on with the last message, or else follows it where the template
    does not write it as it is: Anthropic's clients do not ask which."""
    try:
        return read(chat)
    except BadRequest as error:
        if error.param != "continue_final_message":
            raise
    return read(chat.model_copy(update={"continue_final_message": False, "add_generation_prompt": True}))


def read_ollama(body: OllamaAnswering, context: ReadingContext) -> Conversation:
    if isinstance(body, OllamaGenerateRequest) and (body.raw or body.suffix):
        chat, text = body.chat, body.prompt or ""
        text = write_infill(text, body.suffix, context.tokenizer) if body.suffix else text
        return read_raw(text, chat, context)
    most = None if body.truncate is False else body.asked.window(context.facts.max_model_len)
    return _read_continued(_arranged(body.chat, context), lambda chat: _read_fitting(chat, context, most))


def count_tokens(body: Asks, context: ReadingContext) -> int:
    """The number of tokens of the prompt, however long it is."""
    return _read_continued(_arranged(body.chat, context), lambda chat: _count(chat, context))


def _count(chat: ChatRequest, context: ReadingContext) -> int:
    ids, _ = encode_conversation(
        write_chat(chat, context), context, add_special_tokens=chat.add_special_tokens, bounded=False
    )
    return len(ids)


def _arranged(chat: ChatRequest, context: ReadingContext) -> ChatRequest:
    return chat.model_copy(update={"messages": arranged(chat.messages, context.tokenizer.chat)})


def _read_fitting(chat: ChatRequest, context: ReadingContext, most: int | None) -> Conversation:
    """Reads a conversation, and once more without its oldest turns if it has `most` tokens or more. None: it
    is read whole."""
    try:
        found = read_chat(chat, context)
    except BadRequest as error:
        if most is None or error.param not in _TOO_LONG:
            raise
    else:
        if most is None or found.prompt.length < most:
            return found
    return read_chat(_shortened(chat, context, most), context)


def _shortened(chat: ChatRequest, context: ReadingContext, most: int) -> ChatRequest:
    """The conversation without the oldest turns, as many as must go for less than `most` tokens."""
    turns = [index for index, message in enumerate(chat.messages) if message.role == "user"]

    def fits(dropped: int) -> bool:
        return _count(_since(chat, turns[dropped]), context) < most

    if len(turns) < 2:
        return chat
    fewest = bisect_left(range(1, len(turns) - 1), True, key=fits)
    return _since(chat, turns[1 + fewest])


def _since(chat: ChatRequest, start: int) -> ChatRequest:
    """The conversation from a message on, with what the system has said before."""
    kept = [message for message in chat.messages[:start] if message.role in ("system", "developer")]
    return chat.model_copy(update={"messages": [*kept, *chat.messages[start:]]})
