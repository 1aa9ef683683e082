"""The way of a body to the frontend, and of an answer to the client, for all dialects that generate.

A dialect is a file with two pure functions: `read` makes an ask of a body whose texts have been read, and a
writer makes events, or the whole answer, of the parts that come.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import UNSET
from pydantic_core import from_json

from server.frontend.asks import Ask
from server.frontend.asks.answers import Answer, Shown
from server.frontend.asks.parts import End, Head, Part, Terms
from server.frontend.text_output import ALL_TOKENS
from server.http.sse import DONE, Chunks, EventStream, StreamForm, json_response
from server.options.server_flags import ServerConfig
from server.routes.request_context import config_of, frontend_of, read_texts, terms_of, with_warnings
from server.schemas.body import Body
from server.schemas.sampling_fields import ChunkChoice, GenerationBody, RequestTerms, StreamOptions

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


async def ask(
    request: Request,
    body: Body,
    said: RequestTerms,
    prefix: str,
    read: Callable[[T, Terms, ServerConfig], Ask[R]],
) -> R:
    """Asks the frontend for what `read` makes of the texts of a body. `said` is what the body says of the
    request as a whole, and `prefix` begins the answer's id."""
    frontend = frontend_of(request)
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
W_co = TypeVar("W_co", covariant=True)


class ChoiceWriter(Protocol, Generic[C, W_co]):
    """Makes the chunks of one choice. The whole choice is their join, so both forms say the same."""

    def chunk(self, part: Part) -> C: ...

    def join(self, chunks: list[C]) -> W_co: ...


def joined(writers: Sequence[ChoiceWriter[C, W_co]], parts: Sequence[Part]) -> list[W_co]:
    """All choices of an answer whose parts have come."""
    chunks: list[list[C]] = [[] for _ in writers]
    for part in parts:
        chunks[part.choice].append(writers[part.choice].chunk(part))
    return [writer.join(own) for writer, own in zip(writers, chunks, strict=True)]


def ended(parts: Sequence[Part]) -> End:
    """How an answer has ended whose parts have all come."""
    end = parts[-1].end
    assert end is not None, "an answer has ended, and its last part says nothing of that"
    return end


def last_chunk(head: Head, chunks: Chunks, end: End) -> bytes:
    """The end of a stream: a chunk with what was asked for beside the choices, and `[DONE]`."""
    usage = head.whole_usage(end) if head.sends_usage else UNSET
    more: dict[str, Any] = {} if end.metrics is UNSET else {"metrics": end.metrics}
    return (chunks.event(None, usage, **more) if head.sends_usage or more else b"") + DONE


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
            config_of(request).sse_keep_alive_interval,
            answer.expected_header,
            on_flow=answer.set_paused,
            form=writer.form,
            tell_wait=answer.tell_wait,
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
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def new_call_id(dialect: str) -> Callable[[], str]:
    """A function that makes ids of calls in the form that a dialect's templates want."""
    if dialect == "mistral":
        return lambda: "".join(
            secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_LENGTH)
        )
    return lambda: "call_" + secrets.token_hex(12)
