"""The language of an answer that calls tools, in the form in which the model itself writes calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.answers.dialect import Dialect, Thinking
from server.answers.finding import AnswerFormat
from server.grammars.tool_grammar import SPACE, Lark, ToolForm, Unenforceable
from server.text.detokenizer import is_mark


@dataclass(frozen=True, slots=True)
class Written:
    """A grammar, and when it begins to hold."""

    lark: str
    wakes: tuple[tuple[int, ...], ...] = ()
    """The tokens behind which it begins; if there are none, with the first token."""
    again: bool = False
    """Whether it begins again behind the next of `wakes` when it is complete."""
    dropped: tuple[str, ...] = ()
    """What of the tools' schemas is not enforced, as `tool: keyword`."""


class AnswerWriter:
    """Writes grammars for one request. Raises Unenforceable for what a strict tool asks in vain."""

    def __init__(
        self, format: AnswerFormat, tools: Sequence[ToolForm], *, several: bool, is_thinking: bool
    ) -> None:
        """`format` has a dialect.

        `several`: whether there may be more calls than one. `is_thinking`: the prompt has opened the
        reasoning already.
        """
        self._lark = Lark({mark: token for token, mark in format.marks.items()})
        self._token_of = {mark: token for token, mark in format.marks.items()}
        self._dialect, self._opener = _dialect_of(format), format.opener
        self._thinking = format.thinking
        self._tools, self._several, self._is_thinking = tools, several, is_thinking

    def required(self) -> Written:
        """An answer that is calls and nothing else, but for reasoning before them."""
        calls, thinking = self._calls(), self._thinking
        if thinking is not None and self._is_thinking and is_mark(thinking.closes[0]):
            # Asleep while it thinks: the grammar costs nothing then, and a budget of its own may end it.
            wakes = ((self._token_of[thinking.closes[0]],),)
            return self._written(self._lark.sequence(SPACE, self._then(thinking), calls), wakes)
        return self._written(self._with_thought(calls))

    def possible(self) -> Written:
        """An answer of free text, in which calls are held to the grammar if there are any.

        Where a special token opens calls the grammar sleeps until it comes, and text is free of it. Elsewhere
        it follows the text too.
        """
        lark, opener = self._lark, self._opener
        if is_mark(opener):
            return self._written(self._behind(), ((self._token_of[opener],),), again=self._several)
        if is_mark(opener[0]):
            raise Unenforceable("tool_choice auto")  # `AnswerFormat.tells_calls` says why
        if self._dialect.only_first:
            answer = lark.one_of((self._calls(), rf"(/[^{_escaped(opener[0])} \n](?s:.*)/)?"))
        else:
            call = lark.sequence(lark.raw(opener), self._behind())
            answer = lark.sequence(f"({call}){'*' if self._several else '?'}", lark.without(opener))
        return self._written(self._with_thought(answer))

    def _written(
        self, start: str, wakes: tuple[tuple[int, ...], ...] = (), *, again: bool = False
    ) -> Written:
        return Written(self._lark.text(start), wakes, again, tuple(self._lark.dropped))

    def _calls(self) -> str:
        """One call with its opener, or more."""
        one = self._lark.sequence(self._lark.literal(self._opener), self._behind())
        if self._several and not self._dialect.format.holds_several(self._opener):
            return self._lark.many(one, SPACE)
        return one

    def _behind(self) -> str:
        """What stands behind an opener."""
        return self._dialect.format.write(self._lark, self._tools, self._opener, self._several)

    def _with_thought(self, answer: str) -> str:
        """The same with reasoning before it, which the prompt or the model may have opened."""
        lark, thinking = self._lark, self._thinking
        if thinking is None:
            return answer
        rest = lark.sequence(lark.raw(thinking.closes[0]), SPACE, self._then(thinking))
        if self._is_thinking:
            return lark.sequence(rest, answer)
        return lark.sequence(f"({lark.literal(thinking.opens[0])} {rest})?", answer)

    def _then(self, thinking: Thinking) -> str:
        return self._lark.literal(thinking.then)


def _dialect_of(format: AnswerFormat) -> Dialect:
    if format.dialect is None:
        raise ValueError("there is no dialect to write in")
    return format.dialect


def _escaped(character: str) -> str:
    return "\\" + character
