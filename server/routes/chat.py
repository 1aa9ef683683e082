"""POST /v1/chat/completions: the next message of a conversation, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

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
from server.http.sse import Chunks, EventStream, event
from server.options.server_config import ReasoningField, ServerConfig
from server.reading.readings import CHAT
from server.routes.chat_message import MessageReader, joined_calls, joined_text, new_call_id
from server.routes.conversations.turn import Turn, begin_turn
from server.routes.generation import GENERATES, answer, config_of
from worker.protocol import TokenLogprobs

router = APIRouter(route_class=Endpoint, tags=["generate"])


@router.post("/v1/chat/completions", dependencies=GENERATES)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    config = config_of(request)
    chat = _Chat(await begin_turn(request, body, body, CHAT, "chatcmpl-"), config)
    if body.stream:
        silence, job = config.sse_keep_alive_interval, chat.job
        stream = EventStream(
            _events(chat),
            silence,
            job.times.expected_header,
            on_flow=job.set_paused,
            tell_wait=job.tell_wait,
        )
        return chat.turn.warn(stream)
    return chat.turn.warn(await answer(request, _whole(chat)))


class _Chat:
    """A request, the role that its answer has, and how that is read."""

    def __init__(self, turn: Turn, config: ServerConfig) -> None:
        self.job = turn.job
        self.body = turn.chat
        self.turn = turn
        self.reasoning_field: ReasoningField = config.reasoning_field
        last = turn.conversation.last
        self.role = config.response_role if self.body.add_generation_prompt else last.role
        self.echo = last.content if last.role == self.role else ""
        """Text of the last message, if the answer continues it and shall repeat it first."""

    def new_reader(self) -> MessageReader | None:
        """The reader of one choice, if answers are read."""
        reader = self.turn.new_reader()
        if reader is None:
            return None
        return MessageReader(
            reader,
            new_id=new_call_id(self.turn.dialect),
            reasoning_field=self.reasoning_field,
            include_reasoning=self.body.include_reasoning,
            custom_tools=self.turn.conversation.custom_tools,
        )


async def _whole(chat: _Chat) -> ChatCompletion:
    job, body = chat.job, chat.body
    choices = [_ChatChoiceChunks(chat, index) for index in range(job.choices)]
    chunks: list[list[ChatChunkChoice]] = [[] for _ in choices]
    prompt_entries: list[TokenLogprobs] | None = None
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            chunks[index].append(choices[index].chunk(delta))
            prompt_entries = delta.prompt_logprobs or prompt_entries
    return ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=[choice.join(parts) for choice, parts in zip(choices, chunks, strict=True)],
        usage=job.usage(),
        cache_diagnosis=job.cache_diagnosis,
        prompt_logprobs=None if prompt_entries is None else prompt_logprobs(prompt_entries, job.names),
        prompt_token_ids=job.prompts[0].tokens if body.return_token_ids else None,
    )


async def _events(chat: _Chat) -> AsyncGenerator[bytes]:
    job = chat.job
    choices = [_ChatChoiceChunks(chat, index) for index in range(job.choices)]
    empty = ChatChunk(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint or UNSET,
        choices=[],
    )
    chunks, opening, last = Chunks(empty), _opening(chat, empty), b""
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            if delta.is_notice:
                yield b""
                continue
            chunk = choices[index].chunk(delta)
            usage = job.usage_in_chunk(index)
            says_nothing = chunk.is_empty and isinstance(usage, UnsetType)
            data, opening = opening + (b"" if says_nothing else chunks.event(chunk, usage)), b""
            if not job.running:
                last = data
            elif data:
                yield data
    yield last + job.end(chunks)


def _opening(chat: _Chat, empty: ChatChunk) -> bytes:
    """The first events of a stream: the role of each choice, and the echoed text.

    They are sent together with the first tokens, so that an error before those has a status of its own.
    """
    job = chat.job
    events: list[bytes] = []
    for content in ("", chat.echo) if chat.echo else ("",):
        for index in range(job.choices):
            delta = ChatDelta(content=content) if content else ChatDelta(role=chat.role, content="")
            chunk = msgspec.structs.replace(empty, choices=[ChatChunkChoice(index=index, delta=delta)])
            if job.sends_usage_always:
                chunk.usage = job.usage_of(index)
            if chat.body.return_token_ids and not content:
                chunk.prompt_token_ids = job.prompts[0].tokens
            events.append(event(chunk))
    return b"".join(events)


class _ChatChoiceChunks:
    """Makes the chunks of one choice. The whole answer is their join, so both forms say the same."""

    def __init__(self, chat: _Chat, index: int) -> None:
        self._chat = chat
        self._index = index
        self._reader = chat.new_reader()

    def chunk(self, delta: Delta) -> ChatChunkChoice:
        body, reader = self._chat.body, self._reader
        if reader is None:
            message = ChatDelta(content=delta.text)
        else:
            message = reader.delta(delta.text, delta.widths, ended=delta.finish_reason is not None)
            self._chat.job.count_reasoning(self._index, reader.reasoning_tokens)
        chunk = ChatChunkChoice(index=self._index, delta=message)
        if body.logprobs and delta.token_ids:
            chunk.logprobs = ChatLogprobs(
                chat_logprobs(delta.token_ids, delta.logprobs, self._chat.job.names)
            )
        if body.return_token_ids:
            chunk.token_ids = delta.token_ids
        if delta.finish_reason is not None:
            called = reader is not None and reader.has_calls
            chunk.finish_reason = self._chat.turn.finish_reason(delta.finish_reason, has_calls=called)
            chunk.stop_reason = delta.stop_reason
        return chunk

    def join(self, chunks: list[ChatChunkChoice]) -> ChatChoice:
        body, last = self._chat.body, chunks[-1]
        deltas = [chunk.delta for chunk in chunks]
        text = joined_text([delta.content for delta in deltas])
        if self._reader is None or text is not None or self._chat.echo:
            text = self._chat.echo + (text or "")
        reasoning = joined_text([delta.spoken() or "" for delta in deltas])
        field = self._chat.reasoning_field
        logprobs = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
        ids = [id for chunk in chunks for id in chunk.token_ids or ()]
        return ChatChoice(
            index=self._index,
            message=ChatMessage(
                role=self._chat.role,
                content=text,
                tool_calls=joined_calls(deltas),
                reasoning=reasoning if field != "reasoning_content" else None,
                reasoning_content=reasoning if field != "reasoning" and reasoning else UNSET,
            ),
            logprobs=ChatLogprobs(logprobs) if body.logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=None if isinstance(last.stop_reason, UnsetType) else last.stop_reason,
            token_ids=ids if body.return_token_ids else None,
        )
