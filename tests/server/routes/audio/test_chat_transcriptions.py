"""What stands ahead of the text in an answer to a sound is taken out, however the answer comes in parts."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from server.routes.audio.spoken_chats import SpokenText

SAID = (
    ("language English<asr_text> A gull. ", "A gull."),
    ("\nlanguage None<asr_text>", ""),
    ("language<asr_text>a", "a"),
    ("lang is short", "lang is short"),
    ("language of gulls", "language of gulls"),
    (" A gull,  two\n", "A gull,  two"),
    ("", ""),
)


@settings(max_examples=60)
@given(st.sampled_from(SAID), st.lists(st.integers(0, 30), max_size=8))
def test_a_text_that_comes_in_parts_is_told_once_and_whole(said: tuple[str, str], cuts: list[int]) -> None:
    answer, right = said
    spoken, places = SpokenText("<asr_text>"), [0, *sorted(cuts), len(answer)]
    told = [spoken.push(answer[first:last]) for first, last in pairwise(places)]
    assert "".join([*told, spoken.flush()]) == right


def test_a_text_is_told_as_soon_as_it_is_known() -> None:
    spoken = SpokenText("<asr_text>")
    assert [spoken.push(part) for part in ("language ", "German<asr", "_text>", " Eine", " ", "Möwe")] == [
        "", "", "", "Eine", "", " Möwe",
    ]  # fmt: skip
    assert SpokenText("").push("language") == "language", "the language was given"
