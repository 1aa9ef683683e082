"""Bodies of completions and chats: their sampling parameters, their prompts, their contradictions."""

from typing import Any

from server.requests.sampling_params import SamplingParams
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest

USER = {"role": "user", "content": "a"}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "a", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER], **fields})


def test_defaults() -> None:
    assert completion().to_sampling() == SamplingParams(max_tokens=16)
    assert chat().to_sampling() == SamplingParams(max_tokens=None)


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 42,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "bad_words": ["no"],
        "allowed_token_ids": [3],
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    expected = SamplingParams(**fields, logprobs=2, logit_bias={5: 1.5})
    assert completion(**fields, logprobs=2, logit_bias={"5": 1.5}).to_sampling() == expected
    talked = chat(**fields, logprobs=True, top_logprobs=2, logit_bias={"5": 1.5})
    assert talked.to_sampling() == expected


def test_null_is_as_leaving_out() -> None:
    fields = ["n", "temperature", "presence_penalty", "seed", "stop", "stop_token_ids", "bad_words"]
    fields += ["min_tokens", "logit_bias", "ignore_eos", "skip_special_tokens", "logprobs"]
    fields += ["spaces_between_special_tokens"]
    nothing = dict.fromkeys([*fields, "stream", "echo", "stream_options", "model"])
    assert completion(**nothing).to_sampling() == completion().to_sampling()
    assert chat(**nothing, top_logprobs=None).to_sampling() == chat().to_sampling()
