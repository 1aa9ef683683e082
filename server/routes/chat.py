"""POST /v1/chat/completions: the next message of a conversation, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from server.api.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
)
from server.api.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from server.frontend.frontend import Delta
from server.http.endpoint import Endpoint
from server.http.sse import event
from server.options.server_config import ServerConfig
from server.reading.body_table import CHAT
from server.routes.chat_message import MessageDeltas, joined_calls, joined_text
from server.routes.conversations.conversation_call import ConversationCall, PartReader, begin_conversation
from server.routes.generation import chunk_events, whole_choices
from server.routes.request_context import GENERATES, answer, config_of
from worker.protocol import TokenLogprobs

router = APIRouter(route_class=Endpoint, tags=["generate"])


@router.post("/v1/chat/completions", dependencies=GENERATES)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    config = config_of(request)
    call = await begin_conversation(request, body, body, CHAT, "chatcmpl-")
    writers = [_ChatChoiceWriter(call, index, config) for index in range(call.choices)]
    if not body.stream:
        return call.warn(await answer(request, _whole(call, writers)))
    empty = ChatChunk(
        id=call.id,
        created=call.created,
        model=call.model,
        system_fingerprint=call.fingerprint or UNSET,
        choices=[],
    )
    return call.warn(call.stream(chunk_events(call, writers, empty, _opening(call, writers, empty))))


async def _whole(call: ConversationCall, writers: Sequence[_ChatChoiceWriter]) -> ChatCompletion:
    choices = await whole_choices(call, writers)
    entries = next((writer.prompt_entries for writer in writers if writer.prompt_entries), None)
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        system_fingerprint=call.fingerprint,
        choices=choices,
        usage=call.usage(),
        cache_diagnosis=call.cache_diagnosis,
        prompt_logprobs=None if entries is None else prompt_logprobs(entries, call.names),
        prompt_token_ids=call.prompts[0].tokens if call.chat.return_token_ids else None,
    )


def _opening(call: ConversationCall, writers: Sequence[_ChatChoiceWriter], empty: ChatChunk) -> bytes:
    """The first events of a stream: the role of each choice, and the echoed text.

    They are sent together with the first tokens, so that an error before those has a status of its own.
    """
    events: list[bytes] = []
    role, echo = writers[0].role, writers[0].echo
    for content in ("", echo) if echo else ("",):
        for index in range(call.choices):
            delta = ChatDelta(content=content) if content else ChatDelta(role=role, content="")
            chunk = msgspec.structs.replace(empty, choices=[ChatChunkChoice(index=index, delta=delta)])
            if call.sends_usage_always:
                chunk.usage = call.usage_of(index)
            if call.chat.return_token_ids and not content:
                chunk.prompt_token_ids = call.prompts[0].tokens
            events.append(event(chunk))
    return b"".join(events)


class _ChatChoiceWriter:
    """Makes the chunks of one choice. The whole choice is their join, so both forms say the same."""

    def __init__(self, call: ConversationCall, index: int, config: ServerConfig) -> None:
        self._call, self._index, self._field = call, index, config.reasoning_field
        self._parts = PartReader(call)
        self._message = MessageDeltas(
            call.dialect, self._field, call.chat.include_reasoning, call.conversation.custom_tools
        )
        last = call.conversation.last
        self.role = config.response_role if call.chat.add_generation_prompt else last.role
        self.echo = last.content if last.role == self.role else ""
        """Text of the last message, if the answer continues it and shall repeat it first."""
        self.prompt_entries: list[TokenLogprobs] | None = None

    def chunk(self, delta: Delta) -> ChatChunkChoice:
        body, ended = self._call.chat, delta.finish_reason is not None
        self.prompt_entries = delta.prompt_logprobs or self.prompt_entries
        if self._call.format is None:
            message = ChatDelta(content=delta.text)
        else:
            message = self._message.delta(self._parts.read(delta), ended=ended)
            self._call.count_reasoning(self._index, self._parts.reasoning_tokens)
        chunk = ChatChunkChoice(index=self._index, delta=message)
        if body.logprobs and delta.token_ids:
            chunk.logprobs = ChatLogprobs(chat_logprobs(delta.token_ids, delta.logprobs, self._call.names))
        if body.return_token_ids:
            chunk.token_ids = delta.token_ids
        if delta.finish_reason is not None:
            chunk.finish_reason = self._call.finish_reason(
                delta.finish_reason, has_calls=self._parts.has_calls
            )
            chunk.stop_reason = delta.stop_reason
        return chunk

    def join(self, chunks: list[ChatChunkChoice]) -> ChatChoice:
        body, last = self._call.chat, chunks[-1]
        deltas = [chunk.delta for chunk in chunks]
        text = joined_text([delta.content for delta in deltas])
        if self._call.format is None or text is not None or self.echo:
            text = self.echo + (text or "")
        reasoning = joined_text([delta.spoken() or "" for delta in deltas])
        logprobs = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
        ids = [id for chunk in chunks for id in chunk.token_ids or ()]
        return ChatChoice(
            index=self._index,
            message=ChatMessage(
                role=self.role,
                content=text,
                tool_calls=joined_calls(deltas),
                reasoning=reasoning if self._field != "reasoning_content" else None,
                reasoning_content=reasoning if self._field != "reasoning" and reasoning else UNSET,
            ),
            logprobs=ChatLogprobs(logprobs) if body.logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=None if isinstance(last.stop_reason, UnsetType) else last.stop_reason,
            token_ids=ids if body.return_token_ids else None,
        )
