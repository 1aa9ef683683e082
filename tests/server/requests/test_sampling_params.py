"""Sampling parameters: ranges, defaults, and the refusals in vLLM's words that no body of JSON gets."""

from __future__ import annotations

import math

import pytest
from fake_frontend import byte_tokenizer
from model_facts import READY, changed

from server.errors import BadRequest
from server.model_facts import Facts
from server.request_limits import Limits
from server.requests.sampling_params import SamplingParams
from server.text.tokenizer import NoTokenizer
from worker.protocol import Sampling

TOKENIZER = byte_tokenizer()
FACTS = Facts(
    model_names=("m",),
    root="m",
    created=0,
    ready=changed(READY, vocab_size=258),
    max_model_len=100,
    eos_token_ids=(256, 257),
)


def resolved(prompt_len: int = 10, facts: Facts = FACTS, **fields: object) -> list[Sampling]:
    return SamplingParams(**fields).resolve(facts, TOKENIZER, prompt_len)  # pyright: ignore[reportArgumentType]


def refused(prompt_len: int = 10, facts: Facts = FACTS, **fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        resolved(prompt_len, facts, **fields)
    return caught.value


def test_nothing_asked_is_neutral() -> None:
    [one] = resolved(seed=5)
    assert one == Sampling(max_tokens=16, seed=5, stop_token_ids=(256, 257))
    assert resolved(max_tokens=None)[0].max_tokens == 90


def test_stop_strings_are_refused_without_a_tokenizer() -> None:
    bare = NoTokenizer(TOKENIZER.chat)
    SamplingParams(stop=[]).resolve(FACTS, bare, 10)
    with pytest.raises(BadRequest, match="Use stop_token_ids"):
        SamplingParams(stop="x").resolve(FACTS, bare, 10)


def test_the_checkpoints_defaults_fill_what_is_not_asked() -> None:
    facts = changed(FACTS, defaults={"temperature": 0.5, "top_k": 7, "max_tokens": 4})
    [one] = resolved(facts=facts, max_tokens=None)
    assert (one.temperature, one.top_k, one.max_tokens) == (0.5, 7, 4)
    [one] = resolved(facts=facts, temperature=1.5, top_k=0, max_tokens=9)
    assert (one.temperature, one.top_k, one.max_tokens) == (1.5, 0, 9)


def test_the_operators_bound_cuts_every_answer() -> None:
    facts = changed(FACTS, limits=changed(FACTS.limits, new_tokens=5))
    assert [resolved(facts=facts, max_tokens=most)[0].max_tokens for most in (None, 4, 9)] == [5, 4, 5]
    assert "less than or equal to max_tokens=5" in refused(facts=facts, max_tokens=9, min_tokens=6).message


@pytest.mark.parametrize("temperature", [0, 1e-30, 9e-6])
def test_greedy_drops_what_cannot_matter(temperature: float) -> None:
    [one] = resolved(temperature=temperature, top_p=0.5, top_k=3, min_p=0.1)
    assert (one.temperature, one.top_p, one.top_k, one.min_p) == (0, 1, 0, 0)


@pytest.mark.parametrize("wrong", [{"top_p": 7.0}, {"top_p": 0.0}, {"top_k": -5}, {"min_p": 3.0}])
def test_greedy_refuses_what_drawing_refuses(wrong: dict[str, object]) -> None:
    assert refused(temperature=0, **wrong).message == refused(temperature=1, **wrong).message


def test_values_are_brought_into_range() -> None:
    assert resolved(temperature=0.001)[0].temperature == 0.01
    assert resolved(top_k=-1)[0].top_k == 0
    assert resolved(top_k=2**40)[0].top_k == 0
    assert resolved(logit_bias={3: 100.0, 4: -100.0})[0].logit_bias == {3: 100.0, 4: -100.0}
    assert resolved(max_tokens=99)[0].max_tokens == 90
    assert resolved(logprobs=-1, facts=changed(FACTS, max_logprobs=-1))[0].logprobs == -1
    assert resolved(facts=changed(FACTS, logprobs_mode="raw_logits"))[0].logprobs_mode == "raw_logits"


def test_choices_have_seeds_of_their_own() -> None:
    assert [one.seed for one in resolved(n=3, seed=7)] == [7, 8, 9]
    first, second = resolved(n=2)
    assert second.seed == (first.seed + 1) % 2**63
    assert resolved()[0].seed != resolved()[0].seed
    assert all(0 <= one.seed < 2**63 for one in resolved(n=4, seed=-(2**63)))
    assert resolved(seed=-1)[0].seed != resolved(seed=-1)[0].seed


def test_prompts_of_one_request_are_resolved_as_each_alone() -> None:
    params = SamplingParams(n=2, max_tokens=None, seed=3, min_tokens=1, allowed_token_ids=[1, 2], stop="x")
    lengths = [10, 50, 98]
    assert params.resolve_all(FACTS, TOKENIZER, lengths) == [
        params.resolve(FACTS, TOKENIZER, length) for length in lengths
    ]
    with pytest.raises(BadRequest, match="min_tokens"):
        SamplingParams(min_tokens=9).resolve_all(FACTS, TOKENIZER, [10, 95])
    with pytest.raises(BadRequest, match="maximum context length"):
        SamplingParams().resolve_all(FACTS, TOKENIZER, [10, 101])


def test_what_prompts_share_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(
        TOKENIZER, "encode", lambda text, **more: encoded.append(text) or encode(text, **more)
    )
    SamplingParams(bad_words=["no"]).resolve_all(FACTS, TOKENIZER, [10] * 50)
    assert encoded == ["no", " no"]


def test_long_lists_are_for_few_answers() -> None:
    """Every answer is sent to the engine with a list of its own."""
    facts = changed(FACTS, limits=Limits(sampling_entries=40))
    few = SamplingParams(n=2, allowed_token_ids=[1, 2, 3], logit_bias={1: 1.0}, bad_words=["n"], seed=0)
    few.resolve_all(facts, TOKENIZER, [10, 10])  # 2 ends, 3 allowed, 1 bias, 3 of bad words: 9 x 4
    with pytest.raises(BadRequest, match="at most 6 entries together in a request for 6 answers, got 9"):
        few.resolve_all(facts, TOKENIZER, [10, 10, 10])


def test_stop_tokens_are_the_models_and_the_requests() -> None:
    assert resolved(stop_token_ids=[5, 256, 5])[0].stop_token_ids == (256, 257, 5)
    assert resolved(stop_token_ids=[5], ignore_eos=True)[0].stop_token_ids == (5,)


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    assert resolved(bad_words=["no"])[0].bad_words == (tuple(b"no"), tuple(b" no"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": math.inf}, "temperature must be a finite number, got inf."),
        ({"temperature": math.nan}, "temperature must be a finite number, got nan."),
        ({"top_p": math.nan}, "top_p must be in (0, 1], got nan."),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be in [-2, 2], got nan."),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a finite number, got inf."),
        ({"seed": 2**63}, "seed must fit in 64 bits"),
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"stop": ["x"], "detokenize": False}, "stop strings are only supported when detokenize is True."),
        ({"stop": ["x" * 5000]}, "stop strings may hold at most 4096 bytes together, got 5000."),
        ({"logit_bias": {1: math.nan}}, "logit_bias values must be finite numbers"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "`logit_bias` may hold at most 1024 entries, got 1025.",
        ),
        ({"bad_words": ["a" * 600]}, "bad_words may hold at most 1024 tokens together, got 1201."),
        ({"bad_words": ["a" * 10**6]}, "bad_words may hold at most 1024 tokens together"),
    ],
)
def test_refusals_in_the_words_of_vllm(fields: dict[str, object], message: str) -> None:
    error = refused(**fields)
    assert error.message.startswith(message)
    assert error.param in fields
    assert len(error.message) < 500


def test_prompts_that_leave_no_room() -> None:
    assert refused(prompt_len=0).message == "The decoder prompt cannot be empty"
    assert refused(prompt_len=101).message == (
        "This model's maximum context length is 100 tokens. However, your prompt contains 101 input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input "
        "prompt. (parameter=input_tokens, value=101)"
    )
    assert refused(prompt_len=100).message.startswith(
        "The decoder prompt (length 100) plus the number of requested output tokens (at least 1) is longer "
        "than the maximum model length of 100."
    )
    assert resolved(prompt_len=99)[0].max_tokens == 1


def test_null_and_a_single_stop_string_are_accepted() -> None:
    nothing = resolved(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, seed=1)
    assert nothing == resolved(seed=1)
    assert SamplingParams(stop="ab").stop_strings == ["ab"]
    assert refused(stop="").param == "stop"


def test_what_vllm_has_and_we_do_not_is_refused_by_name() -> None:
    assert "(extra_args in Python) are for logits processors" in refused(extra_args={"a": 1}).message
    resolved(guided_decoding=None, extra_args={}, flat_logprobs=False)


def test_parameters_can_be_changed_and_copied() -> None:
    params = SamplingParams(stop=["a"], temperature=0)
    other = params.clone()
    other.stop, other.extra_args = "b", object()
    assert params == SamplingParams(stop=["a"], temperature=0)
    with pytest.raises(BadRequest, match="extra_args"):
        other.resolve(FACTS, TOKENIZER, 10)
