"""POST /v1/chat/completions: the next message of a conversation, whole or streamed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from server.frontend.asks.answers import Converse
from server.frontend.asks.parts import ConversationHead, End, Part, Terms
from server.http.endpoint import Endpoint
from server.http.sse import event
from server.options.server_flags import ReasoningField, ServerConfig
from server.output_parsing.answer_reader import CustomToolInput
from server.output_parsing.unread_text import AnswerPart, Arguments, CallBegun, CallEnded, Reasoning, Text
from server.reading.prompts import Conversation
from server.routes.answering import ChoicesWriter, ask, new_call_id, repeated_fields, respond, ways_of
from server.schemas import chat as api
from server.schemas.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from worker.protocol import TokenLogprobs

router = APIRouter(route_class=Endpoint, tags=["Chat"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions")
async def create_chat_completion(body: api.ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    answer = await ask(request, body, body.terms, "chatcmpl-", partial(read_chat, body))
    writer = write_chat(answer.head, body, answer.frontend.config)
    return await respond(request, answer, writer, stream=bool(body.stream))


@router.post("/v1/chat/completions/batch")
async def create_batch(body: api.BatchChatRequest, request: Request) -> Response:
    """Answer several conversations in one request, as vLLM does."""
    answer = await ask(request, body, body.terms, "chatcmpl-", partial(read_batch, body))
    return await respond(request, answer, write_chat(answer.head, body, answer.frontend.config), stream=False)


def read_batch(
    body: api.BatchChatRequest, conversations: list[Conversation], terms: Terms, config: ServerConfig
) -> Converse:
    """What several chats ask for together."""
    first = read_chat(body, conversations[0], terms, config)
    return replace(first, prompts=[each.prompt for each in conversations])


def read_chat(
    chat: api.ChatRequest, conversation: Conversation, terms: Terms, config: ServerConfig
) -> Converse:
    """What a chat asks for. Other dialects say what they ask in its words."""
    return Converse(
        terms=terms,
        prompts=[conversation.prompt],
        sampling=chat.to_sampling(),
        chat=chat,
        conversation=conversation,
        **ways_of(chat, config),
    )


def write_chat(
    head: ConversationHead, body: api.ChatRequest, config: ServerConfig
) -> ChoicesWriter[api.ChatChunkChoice, api.ChatChoice]:
    """A writer of the answer to a chat."""
    repeated = repeated_fields(head)
    writers = [_ChatChoiceWriter(head, body, index, config) for index in range(head.choices)]

    def whole(choices: list[api.ChatChoice], end: End) -> api.ChatCompletion:
        entries = next((writer.prompt_entries for writer in writers if writer.prompt_entries), None)
        return api.ChatCompletion(
            **repeated,
            system_fingerprint=head.fingerprint,
            choices=choices,
            usage=head.whole_usage(end),
            metrics=end.metrics,
            prompt_logprobs=None if entries is None else prompt_logprobs(entries, head.names),
            prompt_token_ids=head.prompts[0].tokens if body.return_token_ids else None,
        )

    empty = api.ChatChunk(**repeated, system_fingerprint=head.fingerprint or UNSET, choices=[])
    opening = _opening(head, body, writers[0], empty) if body.stream else b""
    return ChoicesWriter(head, writers, empty, whole, opening)


def _opening(
    head: ConversationHead, body: api.ChatRequest, writer: _ChatChoiceWriter, empty: api.ChatChunk
) -> bytes:
    """The events that tell the role of each choice, and the echoed text."""
    events: list[bytes] = []
    for content in ("", writer.echo) if writer.echo else ("",):
        for index in range(head.choices):
            delta = api.ChatDelta(content=content) if content else api.ChatDelta(role=writer.role, content="")
            chunk = replace(empty, choices=[api.ChatChunkChoice(index=index, delta=delta)])
            if head.sends_usage_always:
                chunk.usage = head.usage(head.counts_before)
            if body.return_token_ids and not content:
                chunk.prompt_token_ids = head.prompts[0].tokens
            events.append(event(chunk))
    return b"".join(events)


class _ChatChoiceWriter:
    """Makes the chunks of one choice. The whole choice is their join, so both forms say the same."""

    def __init__(
        self, head: ConversationHead, body: api.ChatRequest, index: int, config: ServerConfig
    ) -> None:
        self._head, self._body, self._index, self._field = head, body, index, config.reasoning_field
        self._message = _MessageDeltas(
            head.dialect, self._field, body.include_reasoning, head.conversation.custom_tools
        )
        last = head.conversation.last
        self.role = config.response_role if body.add_generation_prompt else last.role
        self.echo = last.content if last.role == self.role else ""
        """Text of the last message, if the answer continues it and shall repeat it first."""
        self.prompt_entries: list[TokenLogprobs] | None = None

    def chunk(self, part: Part) -> api.ChatChunkChoice:
        body, delta, ended = self._body, part.delta, part.delta.finish_reason is not None
        self.prompt_entries = delta.prompt_logprobs or self.prompt_entries
        if self._head.is_read:
            message = self._message.delta(part.said, ended=ended)
        else:
            message = api.ChatDelta(content=delta.text)
        chunk = api.ChatChunkChoice(index=self._index, delta=message)
        if body.logprobs and delta.token_ids:
            chunk.logprobs = ChatLogprobs(chat_logprobs(delta.token_ids, delta.logprobs, self._head.names))
        if body.return_token_ids:
            chunk.token_ids = delta.token_ids
        if ended:
            chunk.finish_reason, chunk.stop_reason = self._head.finish_reason(part), delta.stop_reason
        return chunk

    def join(self, chunks: list[api.ChatChunkChoice]) -> api.ChatChoice:
        body, last = self._body, chunks[-1]
        deltas = [chunk.delta for chunk in chunks]
        text = _joined_text([delta.content for delta in deltas])
        if not self._head.is_read or text is not None or self.echo:
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
