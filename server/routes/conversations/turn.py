"""The next turn of a conversation, whichever API asks for it: its request to the engine, and how it is read.

The APIs differ in how they write a conversation and its answer. What is between is the same for all.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request, Response

from server.answers.answer_format import AnswerFormat
from server.answers.answer_parts import AnswerPart, CallBegun, Text
from server.answers.answer_reader import AnswerReader
from server.api.chat import ChatRequest
from server.api.fields import Body
from server.frontend.frontend import Delta
from server.reading.prompts import Conversation
from server.reading.readings import Reading
from server.routes.answer_bounds import with_warnings
from server.routes.conversations.calling import plan_calls
from server.routes.generation import Job, admit_answers, config_of, frontend_of
from server.routes.read import read


@dataclass(frozen=True, slots=True)
class Turn:
    job: Job
    chat: ChatRequest
    """What is asked, in the words of chat completions."""
    conversation: Conversation
    format: AnswerFormat | None
    """How the answer is read; None where it is text and nothing else."""
    warnings: Sequence[str] = ()
    """What the client is told of calls that are not what it asked for."""
    calls_end_thinking: bool = True
    """Whether a call within the reasoning is one, even without the marker that closes it."""

    @property
    def dialect(self) -> str:
        """The name of the form in which the model writes calls; empty if none is read."""
        return self.format.dialect.name if self.format and self.format.dialect else ""

    def new_reader(self) -> AnswerReader | None:
        """The reader of one choice, if answers are read."""
        if (format := self.format) is None:
            return None
        return AnswerReader(
            format.dialect,
            format.thinking,
            tools=self._callable_tools() or None,
            is_thinking=format.begins_thinking(self.conversation.end),
            written=format.written,
            calls_end_thinking=self.calls_end_thinking,
        )

    def finish_reason(self, finish: str, *, has_calls: bool) -> str:
        """The reason in OpenAI's words: a function that the request has named is no reason of its own."""
        named = self.chat.tool_choice is not None and self.chat.choice.is_named
        return "tool_calls" if has_calls and finish == "stop" and not named else finish

    def _callable_tools(self) -> dict[str, dict[str, object]]:
        tools, chat = self.conversation.tools, self.chat
        if not tools or chat.tool_choice is None:
            return tools
        choice = chat.choice
        return {name: schema for name, schema in tools.items() if choice.allows(name)}

    def warn(self, response: Response) -> Response:
        """The answer, with headers that say what of the request has no effect."""
        return with_warnings(response, (*self.conversation.warnings, *self.warnings))


class TurnParts:
    """Reads the one choice of a turn as parts: reasoning, texts and calls."""

    def __init__(self, turn: Turn) -> None:
        self._reader = turn.new_reader()
        self.has_calls = False

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of reasoning so far."""
        return 0 if self._reader is None else self._reader.reasoning_tokens

    def read(self, delta: Delta) -> list[AnswerPart]:
        """The parts that a delta begins, continues or completes."""
        reader = self._reader
        if reader is None:
            return [Text(delta.text)] if delta.text else []
        parts = reader.push(delta.text, delta.widths)
        if delta.finish_reason is not None:
            parts += reader.finish()
        self.has_calls = self.has_calls or any(isinstance(part, CallBegun) for part in parts)
        return parts


async def events_of(turn: Turn, write: Callable[[Delta], bytes]) -> AsyncGenerator[bytes]:
    """The events that `write` makes of the deltas of a turn; an empty one sends the headers."""
    async with aclosing(turn.job.deltas()) as deltas:
        async for _, delta in deltas:
            events = b"" if delta.is_notice else write(delta)
            if events or delta.is_notice:
                yield events


async def begin_turn(
    request: Request,
    body: Body,
    chat: ChatRequest,
    reading: Reading[Conversation],
    prefix: str,
    *,
    counts_output: bool = True,
) -> Turn:
    """Reads a conversation and makes its request to the engine, or raises the error that refuses it.

    `chat` says in the words of chat completions what `body` asks for, and `prefix` begins the answer's id.
    """
    frontend, config = frontend_of(request), config_of(request)
    frontend.check_model(chat.model)
    conversation = await read(request, body, reading)
    sampling = chat.to_sampling()
    admission = admit_answers(request, 1, sampling.n)
    calling = await plan_calls(frontend, config, chat, conversation)
    format = calling.format
    if format is not None:
        sampling.shown_as = dict(format.marks)
    job = Job(
        *(request, chat, sampling, [conversation.prompt], prefix, admission),
        messages=conversation.said,
        counts_output=counts_output,
        bounds=calling.bounds,
    )
    if format and format.thinking:
        job.reasoning = {}
    return Turn(job, chat, conversation, format, calling.warnings, not calling.sleeps)
