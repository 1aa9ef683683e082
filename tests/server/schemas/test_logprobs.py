"""Logprobs in the shapes of the three kinds of answers."""

import math

import pytest
from fake_frontend import BOS, EOS, byte_tokenizer
from zoo import KINDS, ours

from server.schemas.logprobs import (
    LOWEST,
    CompletionLogprobs,
    PromptLogprob,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from worker.protocol import TokenLogprobs

A, B, C = b"abc"
UNLIKELY = TokenLogprobs([A, B, C], [-3.0, -0.5, -1.0], 7)
"""The logprobs of `a`, which was chosen though `b` and `c` were the most likely."""
LIKELY = TokenLogprobs([B, B, C], [-0.5, -0.5, -1.0], 1)


def names(*, as_ids: bool = False, hides_special: bool = True) -> TokenNames:
    return TokenNames(byte_tokenizer(), as_ids=as_ids, hides_special=hides_special)


def test_completions_tell_the_chosen_token_beside_the_most_likely() -> None:
    told = completion_logprobs([A, B], [UNLIKELY, LIKELY], names(), [0, 1])
    assert told == CompletionLogprobs(
        text_offset=[0, 1],
        token_logprobs=[-3.0, -0.5],
        tokens=["a", "b"],
        top_logprobs=[{"a": -3.0, "b": -0.5, "c": -1.0}, {"b": -0.5, "c": -1.0}],
    )


def test_the_first_token_of_an_echo_has_nothing_to_tell() -> None:
    told = completion_logprobs([A, B], [None, LIKELY], names(), [0, 1])
    assert told.token_logprobs == [None, -0.5]
    assert told.top_logprobs[0] is None


def test_tokens_as_ids() -> None:
    told = completion_logprobs([A], [UNLIKELY], names(as_ids=True), [0])
    assert told.tokens == ["token_id:97"]
    assert told.top_logprobs == [{"token_id:97": -3.0, "token_id:98": -0.5, "token_id:99": -1.0}]


def test_minus_infinity_is_a_number() -> None:
    never = TokenLogprobs([A, B], [-math.inf, -math.inf], 9)
    assert completion_logprobs([A], [never], names(), [0]).token_logprobs == [LOWEST]
    assert chat_logprobs([A], [never], names())[0].top_logprobs[0].logprob == LOWEST
    assert prompt_logprobs([never], names())[1] == {
        "97": PromptLogprob(LOWEST, 9, "a"),
        "98": PromptLogprob(LOWEST, 1, "b"),
    }


def test_chat_tells_the_most_likely_and_bytes() -> None:
    [told] = chat_logprobs([A], [UNLIKELY], names())
    assert (told.token, told.logprob, told.bytes) == ("a", -3.0, [A])
    assert [(top.token, top.logprob, top.bytes) for top in told.top_logprobs] == [
        ("b", -0.5, [B]),
        ("c", -1.0, [C]),
    ]


def test_bytes_of_half_a_character_are_exact() -> None:
    first, second = "é".encode()
    entries = [TokenLogprobs([id], [-1.0], 1) for id in (first, second)]
    told = chat_logprobs([first, second], entries, names())
    assert bytes(told[0].bytes + told[1].bytes).decode() == "é"


def test_prompt_logprobs_have_ranks() -> None:
    assert prompt_logprobs([UNLIKELY, LIKELY], names()) == [
        None,
        {
            "97": PromptLogprob(-3.0, 7, "a"),
            "98": PromptLogprob(-0.5, 1, "b"),
            "99": PromptLogprob(-1.0, 2, "c"),
        },
        {"98": PromptLogprob(-0.5, 1, "b"), "99": PromptLogprob(-1.0, 2, "c")},
    ]


@pytest.mark.parametrize("text", ["plain", "aé漢🙂b"])
def test_offsets_point_into_the_text(text: str) -> None:
    ids = list(text.encode())
    offsets, end = names().offsets(ids, 5)
    assert end == 5 + len(text)
    starts = [i for i, byte in enumerate(ids) if byte & 0xC0 != 0x80]
    assert [offsets[i] for i in starts] == [5 + i for i in range(len(text))]


def test_hidden_tokens_take_no_room() -> None:
    assert names().offsets([BOS, A, EOS], 0) == ([0, 0, 1], 1)
    assert names(hides_special=False).offsets([BOS, A], 0) == ([0, 5], 6)


@pytest.mark.parametrize("hides_special", [True, False])
def test_offsets_of_an_echo_are_those_of_its_text(hides_special: bool) -> None:
    tokenizer, text = ours(KINDS["sentencepiece"]()), "the quick fox"
    ids = [tokenizer.token_id("<s>") or 0, *tokenizer.encode(text)]
    echo = TokenNames(tokenizer, as_ids=False, hides_special=hides_special)
    assert echo.offsets(ids, echo.begin(ids, text)) == ([0, 0, 3, 9], len(text))
