"""Sampling parameters: ranges, defaults, and the refusals in vLLM's words that no body of JSON gets."""

from __future__ import annotations

import math

import pytest
from fake_frontend import byte_tokenizer
from model_facts import READY, changed

from server.errors import BadRequest
from server.model_facts import Facts, Limits
from server.requests.sampling_params import SamplingParams
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


@pytest.mark.parametrize("wrong", [{"top_p": 7.0}, {"top_p": 0.0}, {"top_k": -5}, {"min_p": 3.0}])
def test_greedy_refuses_what_drawing_refuses(wrong: dict[str, object]) -> None:
    assert refused(temperature=0, **wrong).message == refused(temperature=1, **wrong).message


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


def test_long_lists_are_for_few_answers() -> None:
    """Every answer is sent to the engine with a list of its own."""
    facts = changed(FACTS, limits=Limits(sampling_entries=40))
    few = SamplingParams(n=2, allowed_token_ids=[1, 2, 3], logit_bias={1: 1.0}, bad_words=["n"], seed=0)
    few.resolve_all(facts, TOKENIZER, [10, 10])  # 2 ends, 3 allowed, 1 bias, 3 of bad words: 9 x 4
    with pytest.raises(BadRequest, match="at most 6 entries together in a request for 6 answers, got 9"):
        few.resolve_all(facts, TOKENIZER, [10, 10, 10])


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
