"""POST /v1/chat/completions: the next message of a conversation, whole or streamed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from server.frontend.frontend import Delta
from server.http.endpoint import Endpoint
from server.http.sse import event, json_response
from server.options.server_flags import ReasoningField, ServerConfig
from server.output_parsing.answer_reader import CustomToolInput
from server.output_parsing.unread_text import AnswerPart, Arguments, CallBegun, CallEnded, Reasoning, Text
from server.routes.conversations.conversation_call import (
    ConversationCall,
    PartReader,
    begin_conversation,
    new_call_id,
)
from server.routes.generation import chunk_events, whole_choices
from server.routes.request_context import config_of
from server.schemas import chat as api
from server.schemas.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from worker.protocol import TokenLogprobs

router = APIRouter(route_class=Endpoint, tags=["generate"])


@router.post("/v1/chat/completions")
async def create_chat_completion(body: api.ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    config = config_of(request)
    call = await begin_conversation(request, body, body, "chatcmpl-")
    writers = [_ChatChoiceWriter(call, index, config) for index in range(call.choices)]
    if not body.stream:
        return call.warn(json_response(await _whole(call, writers)))
    empty = api.ChatChunk(
        id=call.id,
        created=call.created,
        model=call.model,
        system_fingerprint=call.fingerprint or UNSET,
        choices=[],
    )
    return call.warn(call.stream(chunk_events(call, writers, empty, _opening(call, writers, empty))))


async def _whole(call: ConversationCall, writers: Sequence[_ChatChoiceWriter]) -> api.ChatCompletion:
    choices = await whole_choices(call, writers)
    entries = next((writer.prompt_entries for writer in writers if writer.prompt_entries), None)
    return api.ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        system_fingerprint=call.fingerprint,
        choices=choices,
        usage=call.usage(),
        metrics=call.metrics,
        prompt_logprobs=None if entries is None else prompt_logprobs(entries, call.names),
        prompt_token_ids=call.prompts[0].tokens if call.chat.return_token_ids else None,
    )


def _opening(call: ConversationCall, writers: Sequence[_ChatChoiceWriter], empty: api.ChatChunk) -> bytes:
    """The first events of a stream: the role of each choice, and the echoed text.

    They are sent together with the first tokens, so that an error before those has a status of its own.
    """
    events: list[bytes] = []
    role, echo = writers[0].role, writers[0].echo
    for content in ("", echo) if echo else ("",):
        for index in range(call.choices):
            delta = api.ChatDelta(content=content) if content else api.ChatDelta(role=role, content="")
            chunk = replace(empty, choices=[api.ChatChunkChoice(index=index, delta=delta)])
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
        self._message = _MessageDeltas(
            call.dialect, self._field, call.chat.include_reasoning, call.conversation.custom_tools
        )
        last = call.conversation.last
        self.role = config.response_role if call.chat.add_generation_prompt else last.role
        self.echo = last.content if last.role == self.role else ""
        """Text of the last message, if the answer continues it and shall repeat it first."""
        self.prompt_entries: list[TokenLogprobs] | None = None

    def chunk(self, delta: Delta) -> api.ChatChunkChoice:
        body, ended = self._call.chat, delta.finish_reason is not None
        self.prompt_entries = delta.prompt_logprobs or self.prompt_entries
        if self._call.format is None:
            message = api.ChatDelta(content=delta.text)
        else:
            message = self._message.delta(self._parts.read(delta), ended=ended)
            self._call.count_reasoning(self._index, self._parts.reasoning_tokens)
        chunk = api.ChatChunkChoice(index=self._index, delta=message)
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

    def join(self, chunks: list[api.ChatChunkChoice]) -> api.ChatChoice:
        body, last = self._call.chat, chunks[-1]
        deltas = [chunk.delta for chunk in chunks]
        text = _joined_text([delta.content for delta in deltas])
        if self._call.format is None or text is not None or self.echo:
            text = self.echo + (text or "")
        reasoning = _joined_text([delta.spoken() or "" for delta in deltas])
        logprobs = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
        ids = [id for chunk in chunks for id in chunk.token_ids or ()]
        return api.ChatChoice(
            index=self._index,
            message=api.ChatMessage(
                role=self.role,
                content=text,
                tool_calls=_joined_calls(deltas),
                reasoning=reasoning if self._field != "reasoning_content" else None,
                reasoning_content=reasoning if self._field != "reasoning" and reasoning else UNSET,
            ),
            logprobs=ChatLogprobs(logprobs) if body.logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=None if isinstance(last.stop_reason, UnsetType) else last.stop_reason,
            token_ids=ids if body.return_token_ids else None,
        )


class _MessageDeltas:
    """Makes the deltas of one message."""

    def __init__(
        self,
        dialect: str,
        reasoning_field: ReasoningField,
        include_reasoning: bool,
        custom_tools: Collection[str],
    ) -> None:
        self._custom = custom_tools
        self._custom_input: CustomToolInput | None = None
        """The input of the custom tool whose call is being read."""
        self._calls = 0
        self._new_id = new_call_id(dialect)
        self._field = reasoning_field
        self._include_reasoning = include_reasoning

    def delta(self, parts: Iterable[AnswerPart], *, ended: bool) -> api.ChatDelta:
        """The delta that these next parts of the answer make, which may be empty."""
        delta = api.ChatDelta()
        calls: list[api.ToolCallDelta] = []
        for part in parts:
            self._add(part, delta, calls)
        if ended:
            self._end_custom(self._calls - 1, calls)
        if calls:
            delta.tool_calls = calls
        return delta

    def _add(self, part: AnswerPart, delta: api.ChatDelta, calls: list[api.ToolCallDelta]) -> None:
        match part:
            case Text(text):
                delta.content = ("" if isinstance(delta.content, UnsetType) else delta.content) + text
            case Reasoning(text) if self._include_reasoning:
                so_far = (delta.spoken() or "") + text
                if self._field != "reasoning_content":
                    delta.reasoning = so_far
                if self._field != "reasoning":
                    delta.reasoning_content = so_far
            case CallBegun(index, name, id):
                calls.append(self._begin(index, name, id or self._new_id()))
            case Arguments(index, text):
                if self._custom_input is not None:
                    self._add_input(index, self._custom_input.push(text), calls)
                    return
                if not calls or calls[-1].index != index:
                    calls.append(api.ToolCallDelta(index=index, function=api.FunctionDelta(arguments="")))
                calls[-1] = _extended(calls[-1], text)
            case CallEnded(index):
                self._end_custom(index, calls)
            case _:
                pass

    def _begin(self, index: int, name: str, id: str) -> api.ToolCallDelta:
        self._calls = index + 1
        if name in self._custom:
            self._custom_input = CustomToolInput()
            return api.ToolCallDelta(index=index, id=id, type="custom", custom=api.CustomDelta(name=name))
        return api.ToolCallDelta(index=index, id=id, type="function", function=api.FunctionDelta(name=name))

    def _end_custom(self, index: int, calls: list[api.ToolCallDelta]) -> None:
        """Pass the rest of a custom tool's input on, which has ended or broken off."""
        if self._custom_input is not None:
            self._add_input(index, self._custom_input.end(), calls)
            self._custom_input = None

    def _add_input(self, index: int, text: str, calls: list[api.ToolCallDelta]) -> None:
        if calls and calls[-1].index == index and not isinstance(calls[-1].custom, UnsetType):
            calls[-1].custom.input += text
        elif text:
            calls.append(api.ToolCallDelta(index=index, custom=api.CustomDelta(input=text)))


def _extended(call: api.ToolCallDelta, arguments: str) -> api.ToolCallDelta:
    """The same call with more of its arguments."""
    if not isinstance(call.function, UnsetType):
        call.function.arguments += arguments
    return call


def _joined_calls(deltas: Iterable[api.ChatDelta]) -> list[api.ToolCallDelta]:
    """The whole calls of a message, from all of its deltas."""
    calls: list[api.ToolCallDelta] = []
    for delta in deltas:
        for call in () if isinstance(delta.tool_calls, UnsetType) else delta.tool_calls:
            if call.index == len(calls):
                calls.append(replace(_copied(call), index=UNSET))
                continue
            joined = calls[-1]
            if not isinstance(call.function, UnsetType):
                _extended(joined, call.function.arguments)
            elif not isinstance(call.custom, UnsetType) and not isinstance(joined.custom, UnsetType):
                joined.custom.input += call.custom.input
    return calls


def _copied(call: api.ToolCallDelta) -> api.ToolCallDelta:
    function = call.function if isinstance(call.function, UnsetType) else replace(call.function)
    custom = call.custom if isinstance(call.custom, UnsetType) else replace(call.custom)
    return replace(call, function=function, custom=custom)


def _joined_text(pieces: Sequence[str | UnsetType]) -> str | None:
    """The join of what came; None if nothing came."""
    return "".join(piece for piece in pieces if not isinstance(piece, UnsetType)) or None
