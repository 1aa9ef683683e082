"""A grammar binds the answer, and not the reasoning before it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spelled import byte_spelling

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.matcher import GrammarError
from engine_core.protocol import Grammar
from server.grammars.after_reasoning import Markers, behind_thinking
from server.grammars.building import Built, build
from server.grammars.structured_params import Asked, StructuredOutputsParams

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


CALLS = Built("lark", f'start: <[{CALL}]> /[0-9]/ "!"')


def accepts(markers: Markers, params: dict[str, Any], text: str, calls: Built | None = None) -> bool:
    """Whether a text is allowed, in which [, ] and ^ stand for the special tokens."""
    built = behind_thinking(build(Asked(StructuredOutputsParams(**params), "f"), {}), markers, calls)
    grammar = Grammar(built.kind, built.text)
    compiler = GrammarCompiler(SPELLING, 260, "", lambda: None)
    matcher = compiler.matcher(compiler.compile(grammar).result(), grammar)
    compiler.stop()
    try:
        for char in text:
            for token in [SPECIAL[char]] if char in SPECIAL else char.encode():
                matcher.take(token)
        if not matcher.complete:
            matcher.take(END)
    except GrammarError:
        return False
    return True


def special(*, is_open: bool) -> Markers:
    return Markers(["\ue000"], ["\ue001"], TOKENS, is_open)


PLAIN = Markers(["Thoughts:"], ["Reply:", "So:\n"], {}, is_open=False)


@pytest.mark.parametrize("params", ANSWERS, ids=lambda params: next(iter(params)))
def test_the_answer_is_bound_behind_reasoning(params: dict[str, Any]) -> None:
    opened = special(is_open=True)
    assert accepts(opened, params, "any {thought} 1\n]\n\n12")
    assert accepts(opened, params, "]12")
    assert not accepts(opened, params, "12")  # still thinking
    assert not accepts(opened, params, "thought]x")
    assert not accepts(opened, params, "a[b]12")


def test_reasoning_may_be_left_out_if_the_model_opens_it() -> None:
    may_open = special(is_open=False)
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
    opened = special(is_open=True)
    assert accepts(opened, ANSWERS[0], "thought]^7!", CALLS)
    assert accepts(opened, ANSWERS[0], "thought]12", CALLS)
    for wrong in ("thought]anything", "thought]^x!", "thought]12^7!", "thou^7!"):
        assert not accepts(opened, ANSWERS[0], wrong, CALLS)
    only_calls = Markers([], [], TOKENS, is_open=False)
    assert accepts(only_calls, ANSWERS[0], "^7!", CALLS) and accepts(only_calls, ANSWERS[0], "12", CALLS)
    assert not accepts(only_calls, ANSWERS[0], "x", CALLS)


def test_what_the_model_writes_between_reasoning_and_an_answer() -> None:
    told = Markers(["\ue000"], ["\ue001"], TOKENS, is_open=False, then="|", answers=">")
    for right in ("[so]|>12", ">12", "[so]|^7!", "^7!"):
        assert accepts(told, ANSWERS[0], right, CALLS)
    for wrong in ("12", "[so]12", "[so]>12", ">^7!"):
        assert not accepts(told, ANSWERS[0], wrong, CALLS)


def test_options_of_json_are_kept() -> None:
    built = build(Asked(StructuredOutputsParams(json={"type": "array"}), "f"), {})
    text = behind_thinking(built, PLAIN).text
    assert "whitespace_pattern" in json.dumps(json.loads(text)["grammars"][1]["json_schema"])
