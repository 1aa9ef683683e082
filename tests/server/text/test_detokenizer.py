"""Text pieces, joined, are the text; they never show half a character, nor half a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
import zoo
from hypothesis import given
from hypothesis import strategies as st

from engine_core.protocol import Tokens
from server.requests.sampling import SamplingParams
from server.text.detokenizer import BROKEN, StopStrings
from server.text.output import Delta, TextOutput
from server.text.tokenizer import Tokenizer
from worker.protocol import TokenLogprobs

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
@given(seeds=st.lists(st.integers(0, 10_000), max_size=40), cuts=CUTS, skip=st.booleans())
def test_any_tokens_give_the_text_of_all_at_once(
    kind: str, seeds: list[int], cuts: list[int], skip: bool
) -> None:
    ids = [seed % raw(kind).get_vocab_size() for seed in seeds]
    expected = raw(kind).decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(ours(kind), ids, cuts, skip)) == expected
    assert ours(kind).decode(ids, skip) == expected


@pytest.mark.parametrize("kind", zoo.KINDS)
@given(text=st.text(max_size=30), cuts=CUTS)
def test_encoded_text_streams_in_whole_characters(kind: str, text: str, cuts: list[int]) -> None:
    ids = raw(kind).encode(text).ids
    expected = raw(kind).decode(ids)
    out = pieces(ours(kind), ids, cuts, True)
    assert "".join(out) == expected
    assert sum(piece.count(BROKEN) for piece in out) == expected.count(BROKEN)


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


def first_to_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition that is tested: the shortest beginning of the text that ends in a stop string."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


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


# Below: one choice of a request. The vocabulary is the bytes, so ids can be written as text.


def out(sampling: SamplingParams, interval: int = 1, eos: Sequence[int] = (0,)) -> TextOutput:
    return TextOutput(0, [65], sampling, byte_tokenizer(), eos, interval)


@cache
def byte_tokenizer() -> Tokenizer:
    from fake_frontend import byte_tokenizer

    return byte_tokenizer()


def say(text: str, finish: str | None = None, extra: Sequence[int] = ()) -> Tokens:
    ids = [*text.encode(), *extra]
    logprobs = [TokenLogprobs(ids=[id], values=[-1.0], rank=1) for id in ids]
    return Tokens(id=1, tokens=ids, logprobs=logprobs, finish=finish)  # pyright: ignore[reportArgumentType]


def pushed(output: TextOutput, new: Tokens) -> Delta:
    delta = output.push(new)
    assert delta is not None
    return delta


def test_an_eos_token_is_hidden_and_is_no_reason() -> None:
    delta = pushed(out(SamplingParams()), say("hi", "stop", [0]))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hi", "stop", None)
    assert delta.token_ids == [*b"hi", 0]
    assert len(delta.logprobs) == 3


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_the_reason_and_shown_only_if_asked(include: bool, text: str) -> None:
    sampling = SamplingParams(stop_token_ids=[33], include_stop_str_in_output=include)
    delta = pushed(out(sampling), say("hi!", "stop"))
    assert (delta.text, delta.stop_reason) == (text, 33)


@pytest.mark.parametrize(("include", "text"), [(False, "say "), (True, "say stop")])
def test_a_stop_string_over_three_tokens_cuts_tokens_and_logprobs(include: bool, text: str) -> None:
    output = out(SamplingParams(stop=["stop"], include_stop_str_in_output=include))
    first = pushed(output, say("say st"))
    last = pushed(output, say("op it now", "length"))
    assert first.text + last.text == text
    assert (last.finish_reason, last.stop_reason) == ("stop", "stop")
    assert last.token_ids == [*b"op"]
    assert len(last.logprobs) == 2
    assert output.count == 8


def test_a_stop_string_inside_a_character_of_bytes() -> None:
    output = out(SamplingParams(stop=["🙂"]))
    texts = [pushed(output, say("", extra=[byte])).text for byte in "ok🙂".encode()]
    assert "".join(texts) == "ok"


def test_stop_strings_are_not_looked_for_among_the_first_min_tokens() -> None:
    output = out(SamplingParams(stop=["a"], min_tokens=3))
    delta = pushed(output, say("aaab"))
    assert (delta.text, delta.finish_reason) == ("aaab", None)
    delta = pushed(output, say("ca"))
    assert (delta.text, delta.finish_reason) == ("c", "stop")


def test_held_back_text_comes_with_the_end() -> None:
    output = out(SamplingParams(stop=["stop"]))
    assert pushed(output, say("a sto")).text == "a "
    assert pushed(output, say("", "length")).text == "sto"


def test_a_text_cut_inside_a_character_ends_in_one_mark() -> None:
    output = out(SamplingParams())
    assert pushed(output, say("a")).text == "a"
    delta = pushed(output, Tokens(id=1, tokens=[0xF0, 0x9F], finish="length"))
    assert delta.text == BROKEN


def test_the_interval_gathers_tokens_but_not_the_first_and_last() -> None:
    output = out(SamplingParams(), interval=3)
    texts = [delta.text if (delta := output.push(say(c))) else None for c in "abcdef"]
    assert texts == ["a", None, None, "bcd", None, None]
    assert pushed(output, say("", "length")).text == "ef"


def test_without_text_only_tokens_come() -> None:
    delta = pushed(out(SamplingParams(detokenize=False)), say("hi", "stop", [0]))
    assert (delta.text, delta.token_ids) == ("", [*b"hi", 0])


def test_first_words_of_the_engine_are_passed_on() -> None:
    output = out(SamplingParams(), interval=5)
    entry = TokenLogprobs(ids=[1], values=[-2.0], rank=3)
    delta = pushed(output, Tokens(id=1, tokens=[97], prompt_logprobs=[entry], cached=7))
    assert (delta.prompt_logprobs, delta.cached_tokens) == ([entry], 7)
