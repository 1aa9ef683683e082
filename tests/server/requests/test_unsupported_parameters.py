"""Parameters that are not supported yet: refused unless they ask for nothing."""

import pytest

from server.errors import BadRequest
from server.requests.sampling_params import SamplingParams
from server.requests.unsupported_parameters import UnsupportedSampling, refuse_keywords

NAMES = UnsupportedSampling.__struct_fields__


def check(**fields: object) -> None:
    SamplingParams(**fields).check_unsupported(NAMES)  # pyright: ignore[reportArgumentType]


def test_values_that_ask_for_nothing_are_accepted() -> None:
    check(logits_processors=[], flat_logprobs=False, best_of=None)
    check(prompt_logprob_start=0, thinking_token_budget=-1)
    refuse_keywords("generate", {"lora_request": None}, ("lora_request",))


def test_zero_is_a_value() -> None:
    """Zero equals False in Python, but a budget of 0 tokens forbids the model to think."""
    with pytest.raises(BadRequest, match="thinking_token_budget is not supported yet"):
        check(thinking_token_budget=0)
    with pytest.raises(TypeError, match="'session_id'"):
        refuse_keywords("generate", {"session_id": 0}, ("session_id",))
