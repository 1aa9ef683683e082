"""The form of one model's answers, in which a mark stands for each special token, and its grammar: reasoning,
and then calls, text, or a form that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine_core.protocol import Thinking
from server.grammars.lark import LarkGrammar, regex
from server.grammars.response_format import AnswerGrammar
from server.output_parsing.dialect import NO_MARKERS, Dialect, ThinkingMarkers
from server.output_parsing.formats.call_format import ANY_SPACE, CallGrammar, ToolForm, Unenforceable
from server.output_parsing.response_template import NAME, described_calls, described_thinking
from server.output_parsing.tool_call_dialects import (
    DIALECTS_BY_NAME,
    THINKING_BY_NAME,
)
from server.text.detokenizer import FIRST_MARK, is_mark

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

NO_REASONING = "thinking_token_budget: it is not known how this model marks its reasoning"

_NO_MARKUP = ("name", "keys", "numbered_by")
"""Fields of dialects whose texts are names, and never special tokens."""

Described = TypeVar("Described")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers: its markup of thinking and of calls of tools."""

    dialect: Dialect | None = None
    thinking: ThinkingMarkers | None = None
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
    def tokens(self) -> dict[str, int]:
        """The special token of each mark."""
        return {mark: id for id, mark in self.marks.items()}

    @property
    def tells_calls(self) -> bool:
        """Whether a grammar can tell calls from text: an opener of several special tokens opens text too."""
        opens = self.dialect.opens if self.dialect else ()
        return not any(is_mark(each[:1]) and not is_mark(each) for each in opens)

    def as_written(self, text: str) -> str:
        """A text in which marks are special tokens again."""
        return "".join(self.written.get(char, char) for char in text)

    def begins_thinking(self, prompt: str) -> bool:
        """Whether this prompt has opened the reasoning already."""
        return bool(self.opens) and prompt.rstrip().endswith(tuple(opener.rstrip() for opener in self.opens))

    def leaves_thinking_open(self, prompt: str) -> bool:
        """Whether the last marker of reasoning in a prompt, which may be any text, is one that opens it."""
        closes = self.thinking.closes if self.thinking else ()
        closed = max((prompt.rfind(self.as_written(literal)) for literal in closes), default=-1)
        return max((prompt.rfind(literal.rstrip()) for literal in self.opens), default=-1) > closed

    def thinking_within(
        self, tokenizer: Tokenizer, budget: int | None, *, is_open: bool, calls: bool = False
    ) -> Thinking:
        """What the engine is told of where an answer thinks, and how long it may.

        `is_open`: the prompt has opened the reasoning. A call ends it too, if there are `calls`.
        """

        def tokens(literals: Sequence[str]) -> tuple[tuple[int, ...], ...]:
            texts = map(self.as_written, literals)
            return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

        thinking = self.thinking
        calls = calls and not (thinking and thinking.always_closes)
        return Thinking(
            budget=budget,
            marker=tokens(thinking.closes[:1])[0] if thinking else (),
            open=is_open,
            opens=tokens(thinking.opens) if thinking else (),
            ends=tokens([self.opener]) if calls and self.opener else (),
        )


def format_of_names(
    dialect: str, thinking: str, tokens: Mapping[str, int], opener: str, described: Mapping[str, Any] | None
) -> AnswerFormat:
    """A format that another process has found, by its names, which are empty where there is none."""
    calls = described_calls(described or {}) if dialect == NAME else DIALECTS_BY_NAME.get(dialect)
    markers = described_thinking(described or {}) if thinking == NAME else THINKING_BY_NAME.get(thinking)
    return format_with(calls, markers, tokens, opener)


def format_with(
    dialect: Dialect | None, thinking: ThinkingMarkers | None, tokens: Mapping[str, int], opener: str
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


def with_marks(described: Described, marks: Mapping[str, str]) -> Described:
    """The same dialect, markers or literal, with the mark of each special token in place of its text."""

    def marked(text: str) -> str:
        for token, mark in marks.items():
            text = text.replace(token, mark)
        return text

    return _with_literals(described, marked)


def literals_of(described: object) -> list[str]:
    """All literals of a dialect or of markers."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    _with_literals(described, collect)
    return found


def _with_literals(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every literal changed. Values of mappings are none."""
    match value:
        case str():
            return change(value)
        case tuple():
            return tuple(_with_literals(each, change) for each in value)
        case Mapping():
            return {change(key): each for key, each in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            literals = [each.name for each in fields(value) if each.name not in _NO_MARKUP]
            return replace(value, **{name: _with_literals(getattr(value, name), change) for name in literals})
        case _:
            return value


class AnswerWriter:
    """Writes the grammar of an answer that calls tools.

    Raises Unenforceable for what a strict tool asks in vain.
    """

    def __init__(
        self, format: AnswerFormat, tools: Sequence[ToolForm], *, several: bool, is_thinking: bool
    ) -> None:
        """`format` has a dialect.

        `several`: whether there may be more calls than one. `is_thinking`: the prompt has opened the
        reasoning already.
        """
        if format.dialect is None:
            raise ValueError("there is no dialect to write in")
        self._lark = CallGrammar(format.tokens)
        self._token_of = format.tokens
        self._dialect, self._opener = format.dialect, format.opener
        self._thinking = format.thinking
        self._tools, self._several, self._is_thinking = tools, several, is_thinking

    def required(self) -> AnswerGrammar:
        """An answer that is calls and nothing else, but for reasoning before them."""
        calls, thinking = self._calls(), self._thinking
        if thinking is not None and self._is_thinking and is_mark(thinking.closes[0]):
            # Asleep while it thinks: the grammar costs nothing then, and a budget of its own may end it.
            wakes = ((self._token_of[thinking.closes[0]],),)
            return self._written(
                self._lark.sequence(ANY_SPACE, self._lark.literal(thinking.then), calls), wakes
            )
        return self._written(self._with_thought(calls))

    def possible(self) -> AnswerGrammar:
        """An answer of free text, in which calls are held to the grammar if there are any.

        Where a special token opens calls the grammar sleeps until it comes, and text is free of it. Elsewhere
        it follows the text too.
        """
        lark, opener = self._lark, self._opener
        if is_mark(opener):
            return self._written(self._behind(), ((self._token_of[opener],),), again=self._several)
        if is_mark(opener[0]):
            raise Unenforceable("tool_choice auto")  # `AnswerFormat.tells_calls` says why
        if opener in self._dialect.only_first:
            answer = lark.one_of((self._calls(), rf"(/[^\{opener[0]} \n](?s:.*)/)?"))
        else:
            call = lark.sequence(lark.raw(opener), self._behind())
            answer = lark.sequence(f"({call}){'*' if self._several else '?'}", lark.without(opener))
        return self._written(self._with_thought(answer))

    def _written(
        self, start: str, wakes: tuple[tuple[int, ...], ...] = (), *, again: bool = False
    ) -> AnswerGrammar:
        return AnswerGrammar("lark", self._lark.whole(start), list(self._lark.dropped), wakes, again)

    def _calls(self) -> str:
        """One call with its opener, or more."""
        lark, dialect = self._lark, self._dialect
        calls = lark.sequence(lark.literal(self._opener), self._behind())
        if self._several and not dialect.format.holds_several(self._opener):
            calls = lark.many(calls, lark.literal(dialect.between) or ANY_SPACE)
        return f"{lark.literal(dialect.before_first)} {calls}".lstrip()

    def _behind(self) -> str:
        """What stands behind an opener."""
        return self._dialect.format.write(self._lark, self._tools, self._opener, self._several)

    def _with_thought(self, answer: str) -> str:
        """The same with reasoning before it, which the prompt or the model may have opened."""
        lark, thinking = self._lark, self._thinking
        if thinking is None:
            return answer
        rest = lark.sequence(lark.raw(thinking.closes[0]), ANY_SPACE, lark.literal(thinking.then))
        if self._is_thinking:
            return lark.sequence(rest, answer)
        return lark.sequence(f"({lark.literal(thinking.opens[0])} {rest})?", answer)


def behind_thinking(
    form: AnswerGrammar,
    format: AnswerFormat,
    calls: AnswerGrammar | None = None,
    *,
    is_open: bool = False,
    may_open: bool = True,
) -> AnswerGrammar:
    """A grammar of reasoning, as the model writes it, and then an answer of this form, or these calls.

    `is_open`: the prompt has opened the reasoning; otherwise the model may, if it `may_open` some.
    """
    lark, thinking = LarkGrammar(format.tokens), format.thinking or NO_MARKERS
    answer = f"{lark.literal(thinking.answers)} @answer".lstrip()
    if calls is not None:
        answer = f"({answer} | @calls)"
    if thinking.closes and (is_open or may_open):
        text = lark.text_without(thinking.closes)
        inside = lark.one_of(lark.until(text, end) for end in thinking.closes)
        behind = f"{inside} space? {lark.literal(thinking.then)}".rstrip()
        opens = lark.one_of(map(lark.literal, thinking.opens))
        answer = f"{behind} {answer}" if is_open else f"({opens} {behind})? {answer}"
    text = lark.text(answer, "space: /[ \\n\\r\\t]{1,20}/")
    grammars = [{"name": "thinking", "lark_grammar": text}, *_named_grammars(form)]
    if calls is not None:
        grammars.append({"name": "calls", "lark_grammar": calls.text})
    return msgspec.structs.replace(form, kind="llguidance", text=json.dumps({"grammars": grammars}))


def _named_grammars(form: AnswerGrammar) -> list[dict[str, Any]]:
    """The grammars of a form, the first of them under the name `answer`."""
    match form.kind:
        case "json":
            return [{"name": "answer", "json_schema": json.loads(form.text)}]
        case "regex":
            return [{"name": "answer", "lark_grammar": f"start: {regex(form.text)}"}]
        case "lark":
            return [{"name": "answer", "lark_grammar": form.text}]
        case "llguidance":
            first, *others = json.loads(form.text)["grammars"]
            return [{**first, "name": "answer"}, *others]
