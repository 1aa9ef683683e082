"""One choice of a request, from tokens to deltas. The vocabulary is the bytes, so ids are written as text."""

from collections.abc import Sequence
from functools import cache

import pytest

from engine_core.engine_stats import Timing
from engine_core.protocol import Tokens
from server.frontend.text_output import Delta, TextOutput
from server.requests.repetition import RepetitionDetectionParams
from server.requests.sampling_params import SamplingParams
from server.text.detokenizer import BROKEN
from server.text.tokenizer import Tokenizer
from worker.protocol import TokenLogprobs


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
    second = pushed(out(SamplingParams(), eos=(0, 1)), say("hi", "stop", [1]))
    assert (second.text, second.stop_reason) == ("hi", 1)  # the first alone is none, as in vLLM


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_the_reason_and_shown_only_if_asked(include: bool, text: str) -> None:
    sampling = SamplingParams(stop_token_ids=[33], include_stop_str_in_output=include)
    delta = pushed(out(sampling), say("hi!", "stop"))
    assert (delta.text, delta.stop_reason) == (text, 33)


def test_a_notice_that_the_request_waits_is_a_delta_of_its_own() -> None:
    output = out(SamplingParams())
    notice = pushed(output, Tokens(id=1, tokens=[], expected=2.5))
    assert notice.is_notice and notice == Delta(0, expected=2.5)
    first = pushed(output, Tokens(id=1, tokens=[97], cached=3, expected=2.5))
    assert not first.is_notice and (first.text, first.cached_tokens, first.expected) == ("a", 3, 2.5)


def test_a_text_that_a_stop_string_ends_has_the_times_so_far() -> None:
    output = out(SamplingParams(stop=["stop"]))
    timing = [Timing(queued=1, prefill=2, decode=decode, preemptions=0) for decode in (3, 4)]
    assert pushed(output, Tokens(id=1, tokens=[*b"a s"], timing=timing[0])).timing is None
    assert pushed(output, Tokens(id=1, tokens=[*b"top b"], timing=timing[1])).timing == timing[1]


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


def test_a_text_that_repeats_itself_ends_with_the_token_that_completes_the_copies() -> None:
    loops = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    output = out(SamplingParams(repetition_detection=loops, stop=["abX"]))
    delta = pushed(output, say("yes abababab"))
    assert (delta.text, delta.token_ids) == ("yes ababab", [*b"yes ababab"])
    assert (delta.finish_reason, delta.stop_reason) == ("repetition", "repetition_detected")


def test_what_ends_with_its_last_copy_anyway_has_the_engine_s_reason() -> None:
    output = out(SamplingParams(repetition_detection=RepetitionDetectionParams(1, 1, 3)))
    assert pushed(output, say("aaa", "length")).finish_reason == "length"


def test_held_back_text_comes_with_the_end() -> None:
    output = out(SamplingParams(stop=["stop"]))
    assert pushed(output, say("a sto")).text == "a "
    assert pushed(output, say("", "length")).text == "sto"


def test_a_text_cut_inside_a_character_ends_in_one_mark() -> None:
    output = out(SamplingParams())
    assert pushed(output, say("a")).text == "a"
    delta = pushed(output, Tokens(id=1, tokens=[0xF0, 0x9F], finish="length"))
    assert delta.text == BROKEN


def test_a_stop_string_that_the_end_completes_is_the_reason() -> None:
    output = out(SamplingParams(stop=[BROKEN]))
    delta = pushed(output, Tokens(id=1, tokens=[97, 0xF0], logprobs=[], finish="length"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", BROKEN)


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
