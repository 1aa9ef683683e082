"""The free text of a custom tool, read while it is written."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from untimed import untimed

from server.answers.answer_reader import CustomToolInput


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def read(pieces: list[str]) -> list[str]:
    reader = CustomToolInput()
    found = [*(reader.push(piece) for piece in pieces), reader.end()]
    assert reader.text == "".join(found)
    return found


CHARACTERS = st.characters(exclude_categories=["Cs"])


@untimed()
@given(st.text(CHARACTERS), st.lists(st.integers(0, 1000)), st.booleans())
def test_the_text_is_the_same_however_it_was_cut(text: str, cuts: list[int], escapes: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escapes)
    assert "".join(read(pieces_of(arguments, cuts))) == text


def test_it_comes_while_it_is_written() -> None:
    assert read([' {"inp', 'ut" : "a', "\\", "nb", "\\u00e9\\ud83d", '\\ude42"', "}"]) == [
        *("", "a", "", "\nb", "é", "🙂", "", ""),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"other": 1, "input": "late"}', "late"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"text": "a"}', '{"text": "a"}'),
        ("[1]", "[1]"),
        ('{"inp', '{"inp'),
        ("", ""),
        ('{"input": "cut \\u12', "cut "),
        ('{"input": "a\nb\tc"}', "a\nb\tc"),
        ('{"input": "half \\ud83d of it"}', "half � of it"),
        ('{"input": "bad \\u12x4 escape"}', "bad "),
    ],
)
def test_what_is_in_another_form_comes_as_it_is(arguments: str, text: str) -> None:
    assert "".join(read(list(arguments))) == text
    assert "".join(read([arguments])) == text
