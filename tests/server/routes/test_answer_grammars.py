"""The form of an answer as the engine is told it, and what the client is told."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Response

from engine_core.protocol import Grammar
from server.errors import BadRequest
from server.frontend.asks.answer_plan import AnswerPlan, plan_form, tell_of_least
from server.frontend.frontend import Frontend
from server.grammars.response_format import AnswerGrammar, AskedForm, StructuredOutputsParams, build_grammar
from server.http.warnings import with_warnings
from server.output_parsing.answer_format import AnswerFormat
from server.output_parsing.dialect import ThinkingMarkers
from server.output_parsing.tool_call_dialects import (
    THINKING_BY_NAME,
)

CALLS = AnswerGrammar("lark", "start: <[9]>")
OPEN, CLOSE, CALL = "\ud800", "\ud801", "\ud802"
MARKS = {7: OPEN, 8: CLOSE, 9: CALL}
THINKS = AnswerFormat(
    thinking=ThinkingMarkers("think", (OPEN,), (CLOSE,)), marks=MARKS, opens=("<think>",), opener=CALL
)


class Grammars:
    async def check(self, asked: AskedForm, owner: str = "") -> AnswerGrammar:
        return build_grammar(asked, {})


async def form(
    format: AnswerFormat | None = None, prompt: str = "", *, calls: AnswerGrammar | None = None, **params: Any
) -> AnswerPlan:
    frontend = cast("Frontend", SimpleNamespace(grammars=Grammars()))
    asked = AskedForm(StructuredOutputsParams(**(params or {"regex": "[0-9]"})), "response_format")
    return await plan_form(frontend, asked, AnswerPlan(format), prompt, calls)


def start(found: AnswerPlan) -> str:
    """The first rule of the grammar that comes before the answer."""
    grammar = found.bounds.get("grammar")
    assert grammar is not None and grammar.kind == "llguidance"
    return json.loads(grammar.text)["grammars"][0]["lark_grammar"].splitlines()[1]


async def test_a_model_that_does_not_reason_is_bound_at_once() -> None:
    for format in (None, AnswerFormat()):
        grammar = (await form(format)).bounds.get("grammar")
        assert grammar is not None and (grammar.kind, grammar.text) == ("regex", "[0-9]")


async def test_reasoning_comes_before_the_answer() -> None:
    assert start(await form(THINKS, "a <think>\n")) == "start: T0 <[8]> space? @answer"
    assert start(await form(THINKS, "a")) == "start: (<[7]> T0 <[8]> space?)? @answer"


async def test_calls_may_take_the_answer_s_place() -> None:
    found = start(await form(THINKS, "<think>", calls=CALLS))
    assert found == "start: T0 <[8]> space? (@answer | @calls)"
    textual = AnswerFormat(opener="<call>", marks=MARKS)
    assert start(await form(textual, calls=CALLS)) == "start: (@answer | @calls)"


@pytest.mark.parametrize(
    ("opener", "params", "refused"),
    [
        ("{", {"json": {"type": "object"}}, True),
        ("[", {"json": {"type": "object"}}, False),
        ("[", {"json": {"type": "array"}}, True),
        ("[", {"regex": "[0-9]"}, True),
        (CALL, {"regex": "[0-9]"}, False),
    ],
)
async def test_calls_that_begin_like_the_answer_are_refused(
    opener: str, params: dict[str, Any], refused: bool
) -> None:
    with pytest.raises(BadRequest, match="tool_choice") if refused else nullcontext():
        await form(AnswerFormat(opener=opener, marks=MARKS), calls=CALLS, **params)


async def test_harmony_names_the_channel_of_an_answer() -> None:
    harmony = AnswerFormat(thinking=THINKING_BY_NAME["openai_gptoss"])
    found = start(await form(harmony, calls=CALLS))
    assert found.endswith('space? "<|start|>assistant")? ("<|channel|>final<|message|>" @answer | @calls)')


async def test_what_is_not_enforced_becomes_a_header() -> None:
    found = await form(json={"type": "array", "uniqueItems": True})
    assert found.warnings == ["response_format: not enforced: uniqueItems"]
    response = with_warnings(Response(), [*found.warnings, 'a "quote"\né'])
    assert response.headers.getlist("warning") == [
        '299 - "response_format: not enforced: uniqueItems"',
        '299 - "a ?quote???"',
    ]


async def test_a_least_length_that_the_form_may_end_becomes_a_header() -> None:
    plan = await form(json={"type": "array", "uniqueItems": True})
    assert tell_of_least(plan, 0) == tell_of_least(plan, None) == plan
    assert tell_of_least(plan, 3).warnings == [
        *plan.warnings,
        "min_tokens: not enforced where the structured output is complete sooner",
    ]
    goes_on = AnswerPlan(bounds={"grammar": Grammar("lark", "start: <[9]>", ((9,),), again=True)})
    for endless in (goes_on, AnswerPlan()):
        assert tell_of_least(endless, 3) == endless
