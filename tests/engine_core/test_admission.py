from __future__ import annotations

import math

import pytest
from fake_worker import facts

from engine_core.admission import refusal
from engine_core.protocol import Add
from worker.protocol import Sampling

LIMITS = facts(block_size=4, num_blocks=8, max_model_len=64)


def refused(tokens: list[int], **params: object) -> str | None:
    sampling = Sampling(**{"max_tokens": 4, **params})  # pyright: ignore[reportArgumentType]
    return refusal(Add(id=1, tokens=tokens, params=sampling), LIMITS, vocab_size=50)


def test_what_can_run_is_not_refused() -> None:
    assert refused([0, 49]) is None
    assert refused([1] * 29, max_tokens=4) is None
    extremes = {
        "temperature": 0.0,
        "top_p": 1e-9,
        "top_k": 2**31 - 1,
        "min_p": 1.0,
        "min_tokens": 4,
        "logprobs": -1,
        "prompt_logprobs": -1,
        "logit_bias": {0: -100.0, 49: 100.0},
        "stop_token_ids": (0, 49),
        "allowed_token_ids": (0,),
        "bad_words": ((1, 2),),
    }
    assert refused([1], **extremes) is None


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "the prompt is empty"),
        ([1] * 64, "has 64 tokens, and the model's 64"),
        ([-1], "outside of the vocabulary, which is 0 to 49"),
        ([1, 50], "outside of the vocabulary, which is 0 to 49"),
        ([1] * 30, "need 9 blocks of the KV cache, and it has 8"),
    ],
)
def test_prompts_that_cannot_run(tokens: list[int], words: str) -> None:
    reason = refused(tokens)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 5},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"top_k": -1},
        {"top_k": 2**40},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {50: 1.0}},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"stop_token_ids": (50,)},
        {"allowed_token_ids": (-1,)},
        {"bad_words": ((1, 50),)},
        {"bad_words": ((),)},
    ],
)
def test_params_that_would_hurt_a_step_are_named(params: dict[str, object]) -> None:
    reason = refused([1, 2], **params)
    (name,) = params
    assert reason is not None and (name in reason or "penalties" in reason)
