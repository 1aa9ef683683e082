"""Turns the parts of an answer into the fields of a chat message, whole or as the deltas of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from server.answers.answer_parts import AnswerPart, Arguments, CallBegun, CallEnded, Reasoning, Text
from server.answers.answer_reader import CustomToolInput
from server.api.chat import ChatDelta, CustomDelta, FunctionDelta, ToolCallDelta
from server.options.server_config import ReasoningField

_ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_MISTRAL_LENGTH = 9


class MessageDeltas:
    """Makes the deltas of one message."""

    def __init__(
        self,
        dialect: str,
        reasoning_field: ReasoningField,
        include_reasoning: bool,
        custom_tools: Collection[str],
    ) -> None:
        self._custom = custom_tools
        self._free_text: CustomToolInput | None = None
        """The input of the custom tool whose call is being read."""
        self._calls = 0
        self._new_id = new_call_id(dialect)
        self._field = reasoning_field
        self._include_reasoning = include_reasoning

    def delta(self, parts: Iterable[AnswerPart], *, ended: bool) -> ChatDelta:
        """The delta that these next parts of the answer make, which may be empty."""
        delta = ChatDelta()
        calls: list[ToolCallDelta] = []
        for part in parts:
            self._add(part, delta, calls)
        if ended:
            self._end_custom(self._calls - 1, calls)
        if calls:
            delta.tool_calls = calls
        return delta

    def _add(self, part: AnswerPart, delta: ChatDelta, calls: list[ToolCallDelta]) -> None:
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
                if self._free_text is not None:
                    self._add_input(index, self._free_text.push(text), calls)
                    return
                if not calls or calls[-1].index != index:
                    calls.append(ToolCallDelta(index=index, function=FunctionDelta(arguments="")))
                calls[-1] = _extended(calls[-1], text)
            case CallEnded(index):
                self._end_custom(index, calls)
            case _:
                pass

    def _begin(self, index: int, name: str, id: str) -> ToolCallDelta:
        self._calls = index + 1
        if name in self._custom:
            self._free_text = CustomToolInput()
            return ToolCallDelta(index=index, id=id, type="custom", custom=CustomDelta(name=name))
        return ToolCallDelta(index=index, id=id, type="function", function=FunctionDelta(name=name))

    def _end_custom(self, index: int, calls: list[ToolCallDelta]) -> None:
        """Pass the rest of a custom tool's input on, which has ended or broken off."""
        if self._free_text is not None:
            self._add_input(index, self._free_text.end(), calls)
            self._free_text = None

    def _add_input(self, index: int, text: str, calls: list[ToolCallDelta]) -> None:
        if calls and calls[-1].index == index and not isinstance(calls[-1].custom, UnsetType):
            calls[-1].custom.input += text
        elif text:
            calls.append(ToolCallDelta(index=index, custom=CustomDelta(input=text)))


def _extended(call: ToolCallDelta, arguments: str) -> ToolCallDelta:
    """The same call with more of its arguments."""
    if not isinstance(call.function, UnsetType):
        call.function.arguments += arguments
    return call


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
                calls.append(replace(_copied(call), index=UNSET))
                continue
            joined = calls[-1]
            if not isinstance(call.function, UnsetType):
                _extended(joined, call.function.arguments)
            elif not isinstance(call.custom, UnsetType) and not isinstance(joined.custom, UnsetType):
                joined.custom.input += call.custom.input
    return calls


def _copied(call: ToolCallDelta) -> ToolCallDelta:
    function = call.function if isinstance(call.function, UnsetType) else replace(call.function)
    custom = call.custom if isinstance(call.custom, UnsetType) else replace(call.custom)
    return replace(call, function=function, custom=custom)


def joined_text(pieces: Sequence[str | UnsetType]) -> str | None:
    """The join of what came; None if nothing came."""
    return "".join(piece for piece in pieces if not isinstance(piece, UnsetType)) or None
