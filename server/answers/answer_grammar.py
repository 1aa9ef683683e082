"""The grammar of an answer in the model's own form: its reasoning, and then its calls, text, or a form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from server.answers.answer_format import AnswerFormat
from server.answers.dialects import NO_MARKERS
from server.answers.formats.call_format import SPACE, CallGrammar, ToolForm, Unenforceable
from server.grammars.form_grammar import AnswerGrammar
from server.grammars.lark import LarkGrammar, regex
from server.text.detokenizer import is_mark


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
            return self._written(self._lark.sequence(SPACE, self._lark.literal(thinking.then), calls), wakes)
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
        if self._dialect.only_first:
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
        rest = lark.sequence(lark.raw(thinking.closes[0]), SPACE, lark.literal(thinking.then))
        if self._is_thinking:
            return lark.sequence(rest, answer)
        return lark.sequence(f"({lark.literal(thinking.opens[0])} {rest})?", answer)


def behind_thinking(
    form: AnswerGrammar, format: AnswerFormat, calls: AnswerGrammar | None = None, *, is_open: bool = False
) -> AnswerGrammar:
    """A grammar of reasoning, as the model writes it, and then an answer of this form, or these calls.

    `is_open`: the prompt has opened the reasoning; otherwise the model may.
    """
    lark, thinking = LarkGrammar(format.tokens), format.thinking or NO_MARKERS
    answer = f"{lark.literal(thinking.answers)} @answer".lstrip()
    if calls is not None:
        answer = f"({answer} | @calls)"
    if thinking.closes:
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
