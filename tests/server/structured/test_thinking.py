"""A grammar binds the answer, and not the reasoning before it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spelled import byte_spelling

from engine_core.grammar.forge import Forge
from engine_core.protocol import Grammar
from engine_core.walking.walker import GrammarError
from server.structured.building import build
from server.structured.params import Asked, StructuredOutputsParams
from server.structured.thinking import Markers, behind_thinking

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


def accepts(markers: Markers, params: dict[str, Any], text: str) -> bool:
    """Whether a text is allowed, in which [, ] and ^ stand for the special tokens."""
    built = behind_thinking(build(Asked(StructuredOutputsParams(**params), "f"), {}), markers)
    grammar = Grammar(built.kind, built.text)
    forge = Forge(SPELLING, 260, "", lambda: None)
    walker = forge.walker(forge.compile(grammar).result(), grammar)
    forge.stop()
    try:
        for char in text:
            for token in [SPECIAL[char]] if char in SPECIAL else char.encode():
                walker.take(token)
        if not walker.complete:
            walker.take(END)
    except GrammarError:
        return False
    return True


def special(*, is_open: bool, calls: str = "") -> Markers:
    return Markers(["\ue000"], ["\ue001"], TOKENS, is_open, calls)


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
    with_calls = special(is_open=True, calls="\ue002")
    assert accepts(with_calls, ANSWERS[0], "thought]^anything ]")
    assert accepts(with_calls, ANSWERS[0], "thought]12")
    assert not accepts(with_calls, ANSWERS[0], "thought]anything")
    only_calls = Markers([], [], TOKENS, is_open=False, calls="\ue002")
    assert accepts(only_calls, ANSWERS[0], "^x") and accepts(only_calls, ANSWERS[0], "12")
    assert not accepts(only_calls, ANSWERS[0], "x")


def test_options_of_json_are_kept() -> None:
    built = build(Asked(StructuredOutputsParams(json={"type": "array"}), "f"), {})
    text = behind_thinking(built, PLAIN).text
    assert "whitespace_pattern" in json.dumps(json.loads(text)["grammars"][1]["json_schema"])
