"""The form of an answer as the engine is told it, and what the client is told."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from fastapi import Response

from server.answers.dialect import Thinking
from server.answers.finding import AnswerFormat
from server.frontend import Frontend
from server.structured.building import Built, build
from server.structured.forms import Form, form_of, with_warnings
from server.structured.params import Asked, StructuredOutputsParams

OPEN, CLOSE, CALL = "\ue000", "\ue001", "\ue002"
MARKS = {7: OPEN, 8: CLOSE, 9: CALL}
THINKS = AnswerFormat(
    thinking=Thinking("think", (OPEN,), (CLOSE,)), marks=MARKS, opens=("<think>",), opener=CALL
)


class Grammars:
    async def prove(self, asked: Asked) -> Built:
        return build(asked, {})


async def form(
    format: AnswerFormat | None = None, prompt: str = "", *, calls: bool = False, **params: Any
) -> Form:
    frontend = cast("Frontend", SimpleNamespace(grammars=Grammars()))
    asked = Asked(StructuredOutputsParams(**(params or {"regex": "[0-9]"})), "response_format")
    return await form_of(frontend, asked, format, prompt, calls=calls)


def start(found: Form) -> str:
    """The first rule of the grammar that comes before the answer."""
    grammar = found.bounds.get("grammar")
    assert grammar is not None and grammar.kind == "llguidance"
    return json.loads(grammar.text)["grammars"][0]["lark_grammar"].splitlines()[1]


async def test_a_model_that_does_not_reason_is_bound_at_once() -> None:
    for format in (None, AnswerFormat()):
        grammar = (await form(format)).bounds.get("grammar")
        assert grammar is not None and (grammar.kind, grammar.text) == ("regex", "[0-9]")


async def test_reasoning_comes_before_the_answer() -> None:
    assert start(await form(THINKS, "a <think>\n")) == "start: (TEXT <[8]> ) space? @answer"
    assert start(await form(THINKS, "a")) == "start: ((<[7]>) (TEXT <[8]> ) space?)? @answer"


async def test_a_call_may_take_the_answer_s_place_if_a_special_token_opens_it() -> None:
    assert start(await form(THINKS, "<think>", calls=True)).endswith("space? (@answer | <[9]> <[*]>*)")
    textual = AnswerFormat(opener="{", marks=MARKS)
    grammar = (await form(textual, calls=True)).bounds.get("grammar")
    assert grammar is not None and grammar.kind == "regex"


async def test_what_is_not_enforced_becomes_a_header() -> None:
    found = await form(json={"type": "array", "uniqueItems": True})
    assert found.warnings == ["response_format: not enforced: uniqueItems"]
    response = with_warnings(Response(), [*found.warnings, 'a "quote"\né'])
    assert response.headers.getlist("warning") == [
        '299 - "response_format: not enforced: uniqueItems"',
        '299 - "a ?quote???"',
    ]
