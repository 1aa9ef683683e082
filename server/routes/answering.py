"""The way of a body to the frontend, and of an answer to the client, for all dialects.

A dialect is a file with two pure functions: `read` makes an ask of a body whose texts have been read, and
`write` makes the answer of what was found. Where texts are generated, a writer makes events, or the whole
answer, of the parts that come.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import string
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import UNSET, UnsetType
from pydantic_core import from_json

from server.access.client_identity import TIMEOUT, limits_of
from server.access.request_state import KEY, RequestState, state_of
from server.errors import BadRequest
from server.frontend.asks import Ask
from server.frontend.asks.answers import Answer, Shown
from server.frontend.asks.parts import End, Head, Part, Terms
from server.frontend.frontend import Frontend
from server.frontend.text_output import ALL_TOKENS
from server.http.middleware import REQUEST_ID
from server.http.sse import DONE, DONE_FORM, Chunks, ClientWatch, EventStream, StreamForm, json_response
from server.http.warnings import with_warnings
from server.media.prompt import NO_MEDIA, LaidMedia
from server.options.server_flags import ServerConfig
from server.reading.body_table import Reading
from server.schemas.body import LONG, Body
from server.schemas.sampling_fields import ChunkChoice, GenerationBody, RequestTerms, StreamOptions
from server.text.characters import whole_characters

R = TypeVar("R")
T = TypeVar("T")

_NO_OPTIONS = StreamOptions()


def ways_of(body: GenerationBody, config: ServerConfig) -> dict[str, Any]:
    """The fields of an ask that all bodies name alike: how much an answer brings at a time, and shows."""
    options = body.stream_options or _NO_OPTIONS
    usage = bool(options.include_usage)
    return {
        "interval": max(config.stream_interval, body.stream_interval or 1) if body.stream else ALL_TOKENS,
        "beams": body.beams() if body.use_beam_search else None,
        "shown": Shown(
            usage, usage and bool(options.continuous_usage_stats), body.return_tokens_as_token_ids
        ),
    }


async def read_texts(request: Request, body: Body) -> Any:
    """Reads the texts of a body as the table of endpoints says, unless the helper has done so already."""
    state: RequestState = request.scope[KEY]
    if state.read is not None:
        return state.read
    reading = state.reading
    if state.frontend.media is None:
        return await _read(state, body, reading, NO_MEDIA)
    watch = ClientWatch(request.receive)
    return await state.read_with_media(lambda media: _read(state, body, reading, media), watch)


async def _read(state: RequestState, body: Body, reading: Reading[R], media: LaidMedia) -> R:
    context = state.frontend.reading_context
    if media:
        context = replace(context, media=media)
    if reading.work is not None and reading.work(body, context) > LONG:
        # The body is short, but what is to be written of it is not.
        raw = json.dumps(body.model_dump(exclude_unset=True)).encode()
        read = state.frontend.long_bodies.read
        return (await read(reading, raw, context.facts, media, owner=state.caller.owner)).result
    return reading.read(body, context)


REPLICA = b"x-data-parallel-rank"
"""The header that names the replica to use. vLLM has the same header with the same meaning."""
PRIORITIES = (b"x-priority", b"x-vllm-priority")
"""The headers that name the priority, in place of the body. vLLM has the second."""


def terms_of(request: Request, said: RequestTerms, prefix: str) -> Terms:
    """How a request is run, as its head and its body say. `prefix` begins the answer's id."""
    state: RequestState = request.scope[KEY]
    config = state.frontend.config
    return Terms(
        state,
        prefix + request_id(state, said.request_id),
        int(time.time()),
        _replica(state, config),
        _priority(state.head, said.priority),
        said.salt,
        limits_of(state.head.get(TIMEOUT), config.access, state.times.started, said.timeout),
        config.reports.enable_timing or "timing" in said.include,
    )


def request_id(state: RequestState, asked: str | None) -> str:
    """The request's id: the client's, or a random one."""
    for where, given in (("X-Request-Id", state.header(b"x-request-id")), ("request_id", asked)):
        if given is not None:
            if not REQUEST_ID.fullmatch(given):
                raise BadRequest(f"{where} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", where)
            return given
    return secrets.token_hex(16)


def _replica(state: RequestState, config: ServerConfig) -> int | None:
    """The number of the replica that the client names in a header; None if it names none."""
    named = state.header(REPLICA)
    if named is None:
        return None
    numbers = config.replicas.numbers
    if not named.isdecimal() or int(named) not in numbers:
        header, first, last = "X-data-parallel-rank", numbers[0], numbers[-1]
        raise BadRequest(
            f"{header}: {named[:20]!r} is not a replica; they are numbered from {first} to {last}"
        )
    return int(named)


def _priority(head: Mapping[bytes, bytes], asked: int) -> int:
    """The priority that a header names, or else the one that the body asked for."""
    for name in PRIORITIES:
        if (value := head.get(name)) is not None:
            if re.fullmatch(b"-?[0-9]{1,18}", value):
                return int(value)
            header, named = name.decode(), value[:20].decode("latin-1")
            raise BadRequest(f"{header}: {named!r} is not a whole number; lower ones run earlier", header)
    return asked


async def maybe_in_thread(work: Callable[[], T], in_thread: bool) -> T:
    """Does what may take long, in a thread if it does."""
    return await asyncio.to_thread(work) if in_thread else work()


async def ask(
    request: Request,
    body: Body,
    said: RequestTerms,
    prefix: str,
    read: Callable[[T, Terms, ServerConfig], Ask[R]],
) -> R:
    """Asks the frontend for what `read` makes of the texts of a body. `said` is what the body says of the
    request as a whole, and `prefix` begins the answer's id."""
    frontend: Frontend = request.scope[KEY].frontend
    frontend.check_model(said.model)
    texts: T = await read_texts(request, body)
    return await frontend.ask(read(texts, terms_of(request, said, prefix), frontend.config))


class AnswerWriter(Protocol):
    """Writes one answer, whole or as events: both say the same."""

    @property
    def form(self) -> StreamForm: ...

    def push(self, part: Part) -> bytes:
        """The events that a part makes."""
        ...

    def last_events(self, end: End) -> bytes:
        """The events behind those of the last part."""
        ...

    def take(self, parts: list[Part]) -> None:
        """Takes all parts, in place of pushing each, where nobody reads the answer as it comes."""
        ...

    @property
    def answer(self) -> msgspec.Struct | Response:
        """The whole answer, once it has ended."""
        ...


C = TypeVar("C", bound=ChunkChoice)
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)


class ChoiceWriter(Protocol, Generic[C, W_co]):
    """Makes the chunks of one choice. The whole choice is their join, so both forms say the same."""

    def chunk(self, part: Part) -> C: ...

    def join(self, chunks: list[C]) -> W_co: ...


def repeated_fields(head: Head) -> dict[str, Any]:
    """The fields that answers, and all chunks of them, begin with in OpenAI's form."""
    return {"id": head.id, "created": head.created, "model": head.model}


class ChoicesWriter(Generic[C, W]):
    """Writes an answer that has choices, as OpenAI's do: whole, or as a chunk for each part of a choice."""

    form = DONE_FORM

    def __init__(
        self,
        head: Head,
        choices: Sequence[ChoiceWriter[C, W]],
        empty: msgspec.Struct,
        write_whole: Callable[[list[W], End], msgspec.Struct],
        opening: bytes = b"",
    ) -> None:
        """`empty` is a chunk that ends in the empty list of its choices, and `write_whole` makes the whole
        answer of the choices. `opening` are the first events: they are sent together with the first part, so
        that an error before it has a status of its own."""
        self._head, self._choices, self._opening = head, choices, opening
        self._chunks, self._write_whole, self._parts = Chunks(empty), write_whole, list[Part]()

    def push(self, part: Part) -> bytes:
        chunk, usage = self._choices[part.choice].chunk(part), self._head.usage_in_chunk(part)
        opening, self._opening = self._opening, b""
        if chunk.is_empty and isinstance(usage, UnsetType):
            return opening
        return opening + self._chunks.event(chunk, usage)

    def last_events(self, end: End) -> bytes:
        """A chunk with what was asked for beside the choices, and `[DONE]`."""
        head = self._head
        usage = head.whole_usage(end) if head.sends_usage else UNSET
        more: dict[str, Any] = {} if end.metrics is UNSET else {"metrics": end.metrics}
        return (self._chunks.event(None, usage, **more) if head.sends_usage or more else b"") + DONE

    def take(self, parts: list[Part]) -> None:
        self._parts = parts

    @property
    def answer(self) -> msgspec.Struct:
        chunks: list[list[C]] = [[] for _ in self._choices]
        for part in self._parts:
            chunks[part.choice].append(self._choices[part.choice].chunk(part))
        joined = [writer.join(own) for writer, own in zip(self._choices, chunks, strict=True)]
        return self._write_whole(joined, ended(self._parts))


def ended(parts: Sequence[Part]) -> End:
    """How an answer has ended whose parts have all come."""
    end = parts[-1].end
    assert end is not None, "an answer has ended, and its last part says nothing of that"
    return end


async def _nothing() -> None:
    return None


async def respond(
    request: Request,
    answer: Answer[Head],
    writer: AnswerWriter,
    *,
    stream: bool,
    before_end: Callable[[], Awaitable[None]] = _nothing,
) -> Response:
    """Answers with events as they come, or with the whole answer.

    `before_end` runs when the answer has ended, before the client is told so.
    """
    if stream:
        response: Response = EventStream(
            _events(answer, writer, before_end),
            state_of(request.scope).frontend.config.sse_keep_alive_interval,
            answer.expected_header,
            on_flow=answer.set_paused,
            form=writer.form,
            standing=answer.standing,
        )
    else:
        writer.take(await answer.whole())
        await before_end()
        whole = writer.answer
        response = whole if isinstance(whole, Response) else json_response(whole)
    return with_warnings(response, answer.warnings) if answer.warnings else response


async def _events(
    answer: Answer[Head], writer: AnswerWriter, before_end: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    """The events that a writer makes; an empty one sends the headers."""
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            if part.is_notice:
                yield b""
                continue
            events = writer.push(part)
            if part.end is not None:
                await before_end()
                events += writer.last_events(part.end)
            if events:
                yield events


_MISTRAL_LENGTH = 9


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call; if they were cut, what is there of them, as clients read a stream."""
    found = None
    with suppress(ValueError, RecursionError):
        found = from_json(arguments, allow_partial=True)
    if found is None:  # perhaps for half a surrogate pair, which that parser refuses
        with suppress(ValueError, RecursionError):
            found = from_json(whole_characters(json.dumps(json.loads(arguments), ensure_ascii=False)))
    return found if isinstance(found, dict) else {}


def new_call_id(dialect: str) -> Callable[[], str]:
    """A function that makes ids of calls in the form that a dialect's templates want."""
    if dialect == "mistral":
        return lambda: "".join(
            secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_LENGTH)
        )
    return lambda: "call_" + secrets.token_hex(12)
