"""Finds how a model writes tool calls and reasoning, by asking its chat template and its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from server.answers.checkpoints.response_template import NAME, described_calls, described_thinking
from server.answers.dialect import Dialect, Thinking, with_marks
from server.answers.dialects import (
    AUTO,
    DIALECTS,
    DIALECTS_BY_NAME,
    THINKING,
    THINKING_BY_NAME,
    dialect_named,
    thinking_named,
)
from server.answers.parts import Arguments, CallBegun, Part
from server.answers.reader import AnswerReader
from server.errors import BadRequest
from server.text.detokenizer import FIRST_MARK, is_mark

_SHORTEST_TOKEN = 4
"""The fewest characters of a special token that is a marker: shorter ones are spaces and punctuation."""
_SHORTEST_OPENER = 3
"""The fewest characters of an opener by which alone a dialect is recognized."""

_NO_MARKUP = ("name", "keys", "numbered_by")
"""Fields of dialects whose texts are names, and never special tokens."""

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
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": _TOOL_NAME, "arguments": json.dumps(_ARGUMENTS)},
        }
    ],
}


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    @property
    def chat(self) -> Template: ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """What the checkpoint says itself of its answers."""
        ...


class Template(Protocol):
    """What is asked of a chat template."""

    @property
    def sources(self) -> Sequence[str]: ...

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How answers of a model are read."""

    dialect: Dialect | None = None
    thinking: Thinking | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    """The mark that stands for each special token of the markup."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The text of each mark."""
    opens: tuple[str, ...] = ()
    """What opens the reasoning, as a chat template writes it."""
    opener: str = ""
    """What the model writes before calls, of all that may stand there."""
    described: Mapping[str, Any] | None = None
    """The checkpoint's own description, of which the dialect or the thinking was made."""

    @property
    def tells_calls(self) -> bool:
        """Whether a grammar can tell calls from text: an opener of several special tokens opens text too."""
        return is_mark(self.opener) or not is_mark(self.opener[:1])

    def as_written(self, text: str) -> str:
        """A text in which marks are special tokens again."""
        return "".join(self.written.get(char, char) for char in text)

    def begins_thinking(self, prompt: str) -> bool:
        """Whether this prompt has opened the reasoning already."""
        return bool(self.opens) and prompt.rstrip().endswith(tuple(opener.rstrip() for opener in self.opens))


@lru_cache(maxsize=4)
def format_of(vocabulary: Vocabulary, tool_parser: str, reasoning_parser: str) -> AnswerFormat:
    """The same as `find_format`, found once."""
    return find_format(vocabulary, tool_parser, reasoning_parser)


def describe_format(vocabulary: Vocabulary, tool_parser: str, reasoning_parser: str) -> str:
    """A sentence for the log on how answers will be read."""
    format = format_of(vocabulary, tool_parser, reasoning_parser)
    calls = f"tool calls as {format.dialect.name} writes them" if format.dialect else "no tool calls"
    thinking = f"reasoning marked as {format.thinking.name}" if format.thinking else "no reasoning"
    return f"chat answers are read for {calls}, and {thinking}"


def find_format(
    vocabulary: Vocabulary, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> AnswerFormat:
    """The dialect and the thinking of these names, or those that the model has."""
    described = vocabulary.response_template or {}
    if tool_parser == AUTO:
        dialect = described_calls(described) or find_dialect(vocabulary)
    else:
        dialect = dialect_named(tool_parser)
    if reasoning_parser == AUTO:
        thinking = described_thinking(described) or find_thinking(vocabulary)
    else:
        thinking = thinking_named(reasoning_parser)
    literals = {*_literals(dialect), *_literals(thinking)}
    tokens = {
        token: id
        for token, id in vocabulary.added_tokens.items()
        if len(token) >= _SHORTEST_TOKEN and any(token in literal for literal in literals)
    }
    found = format_with(dialect, thinking, tokens, _usual_opener(dialect, vocabulary) if dialect else "")
    names = (each.name for each in (dialect, thinking) if each)
    return replace(found, described=described) if NAME in names else found


def format_of_names(
    dialect: str, thinking: str, tokens: Mapping[str, int], opener: str, described: Mapping[str, Any] | None
) -> AnswerFormat:
    """A format that another process has found, by its names, which are empty where there is none."""
    calls = described_calls(described or {}) if dialect == NAME else DIALECTS_BY_NAME.get(dialect)
    markers = described_thinking(described or {}) if thinking == NAME else THINKING_BY_NAME.get(thinking)
    return format_with(calls, markers, tokens, opener)


def format_with(
    dialect: Dialect | None, thinking: Thinking | None, tokens: Mapping[str, int], opener: str
) -> AnswerFormat:
    """The format of answers with marks in place of these special tokens. `opener` opens calls."""
    names = sorted(tokens, key=len, reverse=True)
    marks = {token: chr(FIRST_MARK + number) for number, token in enumerate(names)}
    return AnswerFormat(
        None if dialect is None else with_marks(dialect, marks),
        None if thinking is None else with_marks(thinking, marks),
        {tokens[token]: mark for token, mark in marks.items()},
        {mark: token for token, mark in marks.items()},
        () if thinking is None else thinking.opens,
        with_marks(opener, marks),
    )


def find_dialect(vocabulary: Vocabulary) -> Dialect | None:
    """The first dialect that reads a call as the chat template writes it, or else whose markers are known."""
    written = _written_call(vocabulary.chat)
    if written is not None:
        turn, whole = written
        for dialect in DIALECTS:
            if _reads(dialect, turn) or (not dialect.only_first and _reads(dialect, whole)):
                return dialect
    return next((dialect for dialect in DIALECTS if _is_named(dialect.opens, vocabulary)), None)


def find_thinking(vocabulary: Vocabulary) -> Thinking | None:
    return next(
        (thinking for thinking in THINKING if _is_named(thinking.told_by or thinking.closes, vocabulary)),
        None,
    )


def _usual_opener(dialect: Dialect, vocabulary: Vocabulary) -> str:
    """The first opener that the chat template or the vocabulary has."""
    known = (opener for opener in dialect.opens if _is_known(opener, vocabulary))
    return next(known, dialect.opens[0])


def _written_call(template: Template) -> tuple[str, str] | None:
    """The turn with a call as the template writes it, and the whole conversation; None if it writes none."""
    try:
        whole = template.render([_QUESTION, _CALL], add_generation_prompt=False, tools=[_TOOL])
        before = template.render([_QUESTION], tools=[_TOOL])
    except BadRequest:  # the template refuses such a conversation, or there is none
        return None
    return whole.removeprefix(before) if whole.startswith(before) else whole, whole


def _reads(dialect: Dialect, text: str) -> bool:
    """Whether a dialect reads exactly the call that was asked for."""
    reader = AnswerReader(dialect, None, tools={_TOOL_NAME: _TOOL["function"]["parameters"]})
    parts = [*reader.push(text), *reader.finish()]
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    if names != [_TOOL_NAME]:
        return False
    try:
        return json.loads(_arguments(parts)) == _ARGUMENTS
    except ValueError:
        return False


def _arguments(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Arguments))


def _is_named(literals: Sequence[str], vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary has one of these literals as a token, or a chat template writes it."""
    return any(len(literal) >= _SHORTEST_OPENER and _is_known(literal, vocabulary) for literal in literals)


def _is_known(literal: str, vocabulary: Vocabulary) -> bool:
    return literal in vocabulary.added_tokens or any(literal in source for source in vocabulary.chat.sources)


def _literals(described: object) -> Iterator[str]:
    """All literals of a dialect or of markers."""
    match described:
        case str():
            yield described
        case tuple():
            for each in described:
                yield from _literals(each)
        case Mapping():
            for key in described:
                yield from _literals(key)
        case _ if is_dataclass(described):
            for each in fields(described):
                if each.name not in _NO_MARKUP:
                    yield from _literals(getattr(described, each.name))
        case _:
            pass
