"""Turns the parts of an answer into the fields of a chat message, whole or as the deltas of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence

from msgspec import UNSET, UnsetType

from server.answers.parts import Arguments, CallBegun, Part, Reasoning, Text
from server.answers.reader import AnswerReader
from server.api.chat import ChatDelta, FunctionDelta, ToolCallDelta
from server.options.table import ReasoningField

_ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_MISTRAL_LENGTH = 9


class MessageReader:
    """Reads one choice."""

    def __init__(
        self,
        reader: AnswerReader,
        *,
        new_id: Callable[[], str],
        reasoning_field: ReasoningField,
        include_reasoning: bool,
    ) -> None:
        self.has_calls = False
        self._reader = reader
        self._new_id = new_id
        self._field = reasoning_field
        self._include_reasoning = include_reasoning

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    def delta(self, text: str, widths: Sequence[int] = (), *, ended: bool) -> ChatDelta:
        """The delta of a message that this next piece of the answer makes, whose tokens have these widths."""
        parts = self._reader.push(text, widths)
        if ended:
            parts += self._reader.finish()
        delta = ChatDelta()
        calls: list[ToolCallDelta] = []
        for part in parts:
            self._add(part, delta, calls)
        if calls:
            delta.tool_calls = calls
            self.has_calls = True
        if isinstance(delta.content, UnsetType) and not calls and delta.spoken() is None:
            delta.content = ""
        return delta

    def _add(self, part: Part, delta: ChatDelta, calls: list[ToolCallDelta]) -> None:
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
                function = FunctionDelta(name=name, arguments="")
                calls.append(
                    ToolCallDelta(index=index, id=id or self._new_id(), type="function", function=function)
                )
            case Arguments(index, text):
                if not calls or calls[-1].index != index:
                    calls.append(ToolCallDelta(index=index, function=FunctionDelta(arguments="")))
                calls[-1].function.arguments += text
            case _:
                pass


def new_call_id(dialect: str) -> Callable[[], str]:
    """A function that makes ids of calls in the form that a dialect's templates want."""
    if dialect == "mistral":
        return lambda: "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_LENGTH))
    return lambda: "call_" + secrets.token_hex(12)


def joined_calls(deltas: Iterable[ChatDelta]) -> list[ToolCallDelta]:
    """The whole calls of a message, from all of its deltas."""
    calls: list[ToolCallDelta] = []
    for delta in deltas:
        for call in () if isinstance(delta.tool_calls, UnsetType) else delta.tool_calls:
            if call.index == len(calls):
                function = FunctionDelta(name=call.function.name, arguments=call.function.arguments)
                calls.append(ToolCallDelta(index=UNSET, id=call.id, type="function", function=function))
            else:
                calls[-1].function.arguments += call.function.arguments
    return calls


def joined_text(pieces: Sequence[str | UnsetType]) -> str | None:
    """The join of what came; None if nothing came."""
    return "".join(piece for piece in pieces if not isinstance(piece, UnsetType)) or None
