"""Finds how a model writes tool calls and reasoning, by asking its chat template and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from server.errors import BadRequest
from server.output_parsing.answer_format import AnswerFormat, format_with, literals_of
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.dialect import Dialect, ThinkingMarkers
from server.output_parsing.response_template import NAME, described_calls, described_thinking
from server.output_parsing.tool_call_dialects import (
    AUTO,
    DIALECTS,
    THINKING,
    dialect_named,
    thinking_named,
)
from server.output_parsing.unread_text import Arguments, CallBegun

if TYPE_CHECKING:
    from server.text.chat_template import ChatTemplate
    from server.text.tokenizer import Tokenizer

_SHORTEST_TOKEN = 4
"""The fewest characters of a special token that is a marker: shorter ones are spaces and punctuation."""
_SHORTEST_OPENER = 3
"""The fewest characters of an opener by which alone a dialect is recognized."""

_TOOL_NAME, _ARGUMENTS = "probe_weather", {"city": "Facetville", "days": 3}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
_QUESTION = {"role": "user", "content": "What is the weather?"}
_AS_JSON = json.dumps(_ARGUMENTS)
_WAYS = (_AS_JSON, json.dumps(_AS_JSON))
"""The arguments so that a template gets an object, or JSON text, which DeepSeek V3's and V3.1's take."""


def _turn(arguments: str) -> dict[str, Any]:
    function = {"name": _TOOL_NAME, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_found: WeakKeyDictionary[Tokenizer, dict[tuple[str, str], AnswerFormat]] = WeakKeyDictionary()
"""Formats by the names that were asked for, kept as long as their tokenizer."""


def find_format(tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerFormat:
    """The dialect and the thinking of these names, or those that the model has. It is found once."""
    formats, names = _found.setdefault(tokenizer, {}), (tool_parser, reasoning_parser)
    if names not in formats:
        formats[names] = _find_format(tokenizer, tool_parser, reasoning_parser)
    return formats[names]


def _find_format(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> AnswerFormat:
    described = tokenizer.response_template or {}
    if tool_parser == AUTO:
        dialect = described_calls(described) or find_dialect(tokenizer)
    else:
        dialect = dialect_named(tool_parser)
    if reasoning_parser == AUTO:
        thinking = described_thinking(described) or find_thinking(tokenizer)
    else:
        thinking = thinking_named(reasoning_parser)
    literals = {*literals_of(dialect), *literals_of(thinking)}
    tokens = {
        token: id
        for token, id in tokenizer.added_tokens.items()
        if len(token) >= _SHORTEST_TOKEN and any(token in literal for literal in literals)
    }
    found = format_with(dialect, thinking, tokens, _usual_opener(dialect, tokenizer) if dialect else "")
    names = (each.name for each in (dialect, thinking) if each)
    return replace(found, described=described) if NAME in names else found


def describe_format(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> str:
    """A line for the log on how chat answers will be parsed."""
    format = find_format(tokenizer, tool_parser, reasoning_parser)
    calls, thinking = (each.name if each else "none" for each in (format.dialect, format.thinking))
    return f"chat answers: tool call parser {calls}, reasoning parser {thinking}"


def find_dialect(tokenizer: Tokenizer) -> Dialect | None:
    """The first dialect that reads a call as the chat template writes it, or else whose markers are known."""
    for turn, whole in _written_calls(tokenizer.chat):
        for dialect in DIALECTS:
            may_follow = dialect.opens[0] not in dialect.only_first
            if _reads(dialect, turn) or (may_follow and _reads(dialect, whole)):
                return dialect
    return next((dialect for dialect in DIALECTS if _is_named(dialect.opens, tokenizer)), None)


def find_thinking(tokenizer: Tokenizer) -> ThinkingMarkers | None:
    """The first markers that are known. Those with a literal of their own come before: the vocabulary of such
    a model may have the older markers of its family as well."""
    own_first = sorted(THINKING, key=lambda thinking: not thinking.told_by)
    known = (each for each in own_first if _is_named(each.told_by or each.closes, tokenizer))
    return next(known, None)


def _usual_opener(dialect: Dialect, tokenizer: Tokenizer) -> str:
    """The first opener that the chat template writes, or else that it or the vocabulary has."""
    turns = [turn for turn, _ in _written_calls(tokenizer.chat)]
    written = (opener for opener in dialect.opens if any(opener in turn for turn in turns))
    known = (opener for opener in dialect.opens if _is_known(opener, tokenizer))
    return next(chain(written, known), dialect.opens[0])


def _written_calls(template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Yields the turn with a call as the template writes it, and the whole conversation, for each form of the
    arguments that it does not refuse."""
    for arguments in _WAYS:
        try:
            whole = template.render([_QUESTION, _turn(arguments)], add_generation_prompt=False, tools=[_TOOL])
            before = template.render([_QUESTION], tools=[_TOOL])
        except BadRequest:  # the template refuses such a conversation, or there is none
            continue
        yield whole.removeprefix(before) if whole.startswith(before) else whole, whole


def _reads(dialect: Dialect, text: str) -> bool:
    """Whether a dialect reads exactly the call that was asked for."""
    reader = AnswerReader(dialect, None, tools={_TOOL_NAME: _TOOL["function"]["parameters"]})
    parts = [*reader.push(text), *reader.finish()]
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    if names != [_TOOL_NAME] or reader.repairs:
        return False
    try:
        arguments = "".join(part.text for part in parts if isinstance(part, Arguments))
        return json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False


def _is_named(literals: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has one of these literals as a token, or a chat template writes it."""
    return any(len(literal) >= _SHORTEST_OPENER and _is_known(literal, tokenizer) for literal in literals)


def _is_known(literal: str, tokenizer: Tokenizer) -> bool:
    return literal in tokenizer.added_tokens or any(literal in source for source in tokenizer.chat.sources)
