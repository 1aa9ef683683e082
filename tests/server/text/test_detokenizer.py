"""Text pieces, joined, are the text; they never show half a character, nor half a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
import zoo
from hypothesis import given
from hypothesis import strategies as st
from untimed import untimed

from server.text.detokenizer import BROKEN
from server.text.stop_strings import StopStrings
from server.text.tokenizer import Tokenizer

EXACT = ["byte_level", "metaspace", "wordpiece", "word_ends"]


@cache
def raw(kind: str) -> tokenizers.Tokenizer:
    return zoo.KINDS[kind]()


@cache
def ours(kind: str) -> Tokenizer:
    return zoo.ours(raw(kind))


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], skip: bool, prompt: Sequence[int] = ()
) -> list[str]:
    state = tokenizer.text_state(prompt, skip)
    out: list[str] = []
    at = 0
    for cut in [*cuts, len(ids)]:
        out.append(state.push(ids[at : at + cut]))
        at += cut
    out += [state.push(ids[at:]), state.flush()]
    return out


CUTS = st.lists(st.integers(1, 3), max_size=60)


@pytest.mark.parametrize("kind", EXACT)
@untimed()
@given(seeds=st.lists(st.integers(0, 10_000), max_size=40), cuts=CUTS, skip=st.booleans())
def test_any_tokens_give_the_text_of_all_at_once(
    kind: str, seeds: list[int], cuts: list[int], skip: bool
) -> None:
    ids = [seed % raw(kind).get_vocab_size() for seed in seeds]
    expected = raw(kind).decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(ours(kind), ids, cuts, skip)) == expected
    assert ours(kind).decode(ids, skip) == expected


@pytest.mark.parametrize("kind", zoo.KINDS)
@untimed()
@given(text=st.text(max_size=30), cuts=CUTS)
def test_encoded_text_streams_in_whole_characters(kind: str, text: str, cuts: list[int]) -> None:
    ids = raw(kind).encode(text).ids
    expected = raw(kind).decode(ids)
    out = pieces(ours(kind), ids, cuts, True)
    assert "".join(out) == expected
    assert sum(piece.count(BROKEN) for piece in out) == expected.count(BROKEN)


@untimed()
@given(words=st.lists(st.sampled_from(["▁the", "fox", "▁", "▁▁", "é", "日本", "<plain>", "</s>"])), cuts=CUTS)
def test_sentencepiece_spaces(words: list[str], cuts: list[int]) -> None:
    ids = [raw("sentencepiece").token_to_id(word) for word in words]
    for skip in (True, False):
        expected = raw("sentencepiece").decode(ids, skip_special_tokens=skip)
        assert "".join(pieces(ours("sentencepiece"), ids, cuts, skip)) == expected


def test_bytes_that_are_no_character_show_one_mark_each_and_spoil_no_neighbour() -> None:
    def byte(value: int) -> int:
        return raw("sentencepiece").token_to_id(f"<0x{value:02X}>")

    good, bad = [*"é🙂".encode()], [0xE2, 0x82]
    fox = raw("sentencepiece").token_to_id("fox")
    ids = [*map(byte, good), *map(byte, bad), fox]
    assert (
        pieces(ours("sentencepiece"), ids, [1] * len(ids), True)[:-2]
        == [
            *("", "é", "", "", "", "🙂", "", ""),
            BROKEN * 2 + "fox",
            "",
        ][: len(ids) + 1]
    )


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_every_token_of_a_long_character_is_silent_but_the_last(kind: str) -> None:
    ids = raw(kind).encode("x👩‍🚀").ids
    out = pieces(ours(kind), ids, [1] * len(ids), True)
    assert BROKEN not in "".join(out)
    assert "".join(out) == "x👩‍🚀"
    assert "" in out[:-2]


def test_a_text_that_ends_inside_a_character_shows_the_mark_at_its_end_only() -> None:
    ids = [raw("byte_level").token_to_id(token) for token in ("a", "ð", "Ł")]
    assert pieces(ours("byte_level"), ids, [1, 1, 1], True)[-1] == BROKEN


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace", "wordpiece", "word_ends"])
def test_text_goes_on_where_the_prompt_ended(kind: str) -> None:
    first, second = raw(kind).encode("the quick").ids, raw(kind).encode("the fox").ids
    whole = raw(kind).decode([*first, *second])
    after = "".join(pieces(ours(kind), second, [1] * 9, True, prompt=first))
    assert raw(kind).decode(first) + after == whole
    # A prompt of hidden tokens is no text: the first word has no space before it.
    start = [raw(kind).token_to_id("<s>")]
    assert "".join(pieces(ours(kind), second, [], True, prompt=start)) == raw(kind).decode(second)


def test_tokens_beyond_the_vocabulary_are_empty() -> None:
    assert ours("byte_level").decode([99_999]) == ""
    assert ours("byte_level").token_text(99_999) == ""


# Stop strings.


def first_to_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition that is tested: the shortest beginning of the text that ends in a stop string."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


@untimed()
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=CUTS,
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopStrings(stops, include=include)
    shown, found, at = "", None, 0
    for cut in [*cuts, len(text)]:
        piece = text[at : at + cut]
        at += len(piece)
        new, found = matcher.push(piece)
        shown += new
        if found:
            break
        assert at - len(shown) <= max(map(len, stops)) - 1
    expected = first_to_end(text[:at] if found is None else text, stops)
    if expected is None:
        assert found is None
        assert shown + matcher.flush() == text[:at]
    else:
        end, stop = expected
        assert found == stop
        assert shown == text[: end if include else end - len(stop)]


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    matcher = StopStrings(["\n\nHuman:"], include=False)
    assert matcher.push("Hello there.\n") == ("Hello there.", None)
    assert matcher.push("More\n\nHum") == ("\nMore", None)
    assert matcher.push("bug") == ("\n\nHumbug", None)
