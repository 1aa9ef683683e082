"""A request for the next message of a conversation, whichever API asks, and how its answer is read.

The APIs differ in how they write a conversation and its answer. What is between is the same for all.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from fastapi import Request, Response

from server.access.admission import Admission
from server.answers.answer_parts import AnswerPart, CallBegun, Text
from server.answers.answer_reader import AnswerReader
from server.api.chat import ChatRequest
from server.api.fields import Body
from server.frontend.frontend import Delta
from server.reading.body_table import Reading
from server.reading.prompts import Conversation
from server.requests.sampling import SamplingParams
from server.routes.answer_grammars import AnswerPlan, plan_answer
from server.routes.generation import GenerationCall, admit_answers
from server.routes.request_context import config_of, frontend_of, read_texts, with_warnings

_MISTRAL_LENGTH = 9


class ConversationCall(GenerationCall):
    """A request for the next message of a conversation."""

    def __init__(
        self,
        request: Request,
        chat: ChatRequest,
        sampling: SamplingParams,
        conversation: Conversation,
        plan: AnswerPlan,
        prefix: str,
        admission: Admission,
        *,
        counts_output: bool,
    ) -> None:
        """`chat` is what is asked, in the words of chat completions."""
        super().__init__(
            *(request, chat, sampling, [conversation.prompt], prefix, admission),
            messages=conversation.said,
            counts_output=counts_output,
            bounds=[plan.bounds],
        )
        self.chat, self.conversation, self.format, self._plan = chat, conversation, plan.format, plan
        if self.format and self.format.thinking:
            self.reasoning = {}

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
            calls_end_thinking=not self._plan.holds_late_calls,
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
        return with_warnings(response, (*self.conversation.warnings, *self._plan.warnings))


class PartReader:
    """Reads one choice of an answer as parts: reasoning, texts and calls."""

    def __init__(self, call: ConversationCall) -> None:
        self._reader = call.new_reader()
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


async def begin_conversation(
    request: Request,
    body: Body,
    chat: ChatRequest,
    reading: Reading[Conversation],
    prefix: str,
    *,
    counts_output: bool = True,
) -> ConversationCall:
    """Reads a conversation and makes its request to the engine, or raises the error that refuses it.

    `chat` says in the words of chat completions what `body` asks for, and `prefix` begins the answer's id.
    """
    frontend = frontend_of(request)
    frontend.check_model(chat.model)
    conversation = await read_texts(request, body, reading)
    sampling = chat.to_sampling()
    admission = admit_answers(request, 1, sampling.n)
    plan = await plan_answer(frontend, config_of(request), chat, conversation)
    if plan.format is not None:
        sampling.shown_as = dict(plan.format.marks)
    return ConversationCall(
        request, chat, sampling, conversation, plan, prefix, admission, counts_output=counts_output
    )


def new_call_id(dialect: str) -> Callable[[], str]:
    """A function that makes ids of calls in the form that a dialect's templates want."""
    if dialect == "mistral":
        return lambda: "".join(
            secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_LENGTH)
        )
    return lambda: "call_" + secrets.token_hex(12)
