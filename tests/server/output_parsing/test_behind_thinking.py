"""A grammar binds the answer, and not the reasoning before it."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from spelled import byte_spelling, follows, matcher_of

from server.grammars.response_format import AnswerGrammar, AskedForm, StructuredOutputsParams, build_grammar
from server.output_parsing.answer_format import AnswerFormat, behind_thinking
from server.output_parsing.dialect import ThinkingMarkers

OPEN, CLOSE, CALL, END = 256, 257, 258, 259
SPELLING = byte_spelling(b"<think>", b"</think>", b"<call>", b"<end>", special=4, ends=(END,))
TOKENS = {"\ue000": OPEN, "\ue001": CLOSE, "\ue002": CALL}
SPECIAL = {"[": OPEN, "]": CLOSE, "^": CALL}

ANSWERS: list[dict[str, Any]] = [
    {"json": {"type": "integer"}},
    {"regex": "[0-9]+"},
    {"choice": ["12", "3"]},
    {"grammar": "root ::= [0-9]+"},
    {"structural_tag": {"format": {"type": "regex", "pattern": "[0-9]+"}}},
]


CALLS = AnswerGrammar("lark", f'start: <[{CALL}]> /[0-9]/ "!"')


@dataclass(frozen=True)
class Prompt:
    """How the model writes reasoning, and whether the prompt has opened it."""

    format: AnswerFormat
    is_open: bool = False


def prompt(markers: ThinkingMarkers | None, *, is_open: bool = False) -> Prompt:
    return Prompt(AnswerFormat(None, markers, {id: mark for mark, id in TOKENS.items()}), is_open)


def accepts(given: Prompt, params: dict[str, Any], text: str, calls: AnswerGrammar | None = None) -> bool:
    """Whether a text is allowed, in which [, ] and ^ stand for the special tokens."""
    form = build_grammar(AskedForm(StructuredOutputsParams(**params), "f"), {})
    built = behind_thinking(form, given.format, calls, is_open=given.is_open)
    tokens = [token for char in text for token in ([SPECIAL[char]] if char in SPECIAL else char.encode())]
    return follows(matcher_of(built.for_engine(), SPELLING, 260), tokens, END)


TOLD = ThinkingMarkers("", ("\ue000",), ("\ue001",))
OPENED = prompt(TOLD, is_open=True)
PLAIN = prompt(ThinkingMarkers("", ("Thoughts:",), ("Reply:", "So:\n")))


@pytest.mark.parametrize("params", ANSWERS, ids=lambda params: next(iter(params)))
def test_the_answer_is_bound_behind_reasoning(params: dict[str, Any]) -> None:
    assert accepts(OPENED, params, "any {thought} 1\n]\n\n12")
    assert accepts(OPENED, params, "]12")
    assert not accepts(OPENED, params, "12")  # still thinking
    assert not accepts(OPENED, params, "thought]x")
    assert not accepts(OPENED, params, "a[b]12")


def test_reasoning_may_be_left_out_if_the_model_opens_it() -> None:
    may_open = prompt(TOLD)
    assert accepts(may_open, ANSWERS[0], "12")
    assert accepts(may_open, ANSWERS[0], "[thought]\n12")
    assert not accepts(may_open, ANSWERS[0], "thought]12")
    assert not accepts(may_open, ANSWERS[0], "[thought")


def test_markers_may_be_text() -> None:
    assert accepts(PLAIN, ANSWERS[0], "12")
    assert accepts(PLAIN, ANSWERS[0], "Thoughts: Re ply So: Reply:\n12")
    assert accepts(PLAIN, ANSWERS[0], "Thoughts: x So:\n12")
    assert not accepts(PLAIN, ANSWERS[0], "Thoughts: x Reply: no")


def test_a_call_may_take_the_place_of_the_answer() -> None:
    assert accepts(OPENED, ANSWERS[0], "thought]^7!", CALLS)
    assert accepts(OPENED, ANSWERS[0], "thought]12", CALLS)
    for wrong in ("thought]anything", "thought]^x!", "thought]12^7!", "thou^7!"):
        assert not accepts(OPENED, ANSWERS[0], wrong, CALLS)
    only_calls = prompt(None)
    assert accepts(only_calls, ANSWERS[0], "^7!", CALLS) and accepts(only_calls, ANSWERS[0], "12", CALLS)
    assert not accepts(only_calls, ANSWERS[0], "x", CALLS)


def test_what_the_model_writes_between_reasoning_and_an_answer() -> None:
    told = prompt(replace(TOLD, then="|", answers=">"))
    for right in ("[so]|>12", ">12", "[so]|^7!", "^7!"):
        assert accepts(told, ANSWERS[0], right, CALLS)
    for wrong in ("12", "[so]12", "[so]>12", ">^7!"):
        assert not accepts(told, ANSWERS[0], wrong, CALLS)


def test_options_of_json_are_kept() -> None:
    built = build_grammar(AskedForm(StructuredOutputsParams(json={"type": "array"}), "f"), {})
    text = behind_thinking(built, PLAIN.format).text
    assert "whitespace_pattern" in json.dumps(json.loads(text)["grammars"][1]["json_schema"])


def test_a_model_that_shall_not_think_opens_no_reasoning() -> None:
    form = build_grammar(AskedForm(StructuredOutputsParams(choice=["12", "3"]), "f"), {})

    def may_write(given: Prompt, *tokens: int) -> bool:
        built = behind_thinking(form, given.format, is_open=given.is_open, may_open=False)
        return follows(matcher_of(built.for_engine(), SPELLING, 260), [*tokens], END)

    assert may_write(prompt(TOLD), *b"12") and not may_write(prompt(TOLD), OPEN, CLOSE, *b"12")
    assert may_write(OPENED, CLOSE, *b"12")
