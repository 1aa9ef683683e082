"""Bodies of completions and chats: their sampling parameters, their prompts, their contradictions."""

from typing import Any

import pytest
from pydantic import ValidationError

from server.api.chat import ChatRequest
from server.api.completions import CompletionRequest
from server.errors import BadRequest
from server.requests.sampling import SamplingParams

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


def test_null_max_tokens_is_the_default() -> None:
    assert completion(max_tokens=None).to_sampling().max_tokens == 16
    assert chat(max_tokens=None).to_sampling().max_tokens is None


def test_one_stop_string_is_a_list_of_one() -> None:
    assert completion(stop="end").to_sampling().stop == ["end"]


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 6}, 6)],
)
def test_max_completion_tokens_wins(fields: dict[str, int], max_tokens: int | None) -> None:
    assert chat(**fields).to_sampling().max_tokens == max_tokens


def test_echo_without_tokens_scores_the_prompt() -> None:
    body = completion(echo=True, max_tokens=0, logprobs=2)
    sampling = body.to_sampling()
    assert body.scores_only
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (1, 2, 2)


def test_no_tokens_without_echo_is_left_to_be_refused() -> None:
    body = completion(max_tokens=0)
    assert not body.scores_only
    assert body.to_sampling().max_tokens == 0


def test_echo_asks_for_prompt_logprobs_only_with_logprobs() -> None:
    assert completion(echo=True).to_sampling().prompt_logprobs is None
    assert completion(echo=True, logprobs=3, prompt_logprobs=1).to_sampling().prompt_logprobs == 1


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_shapes_of_a_prompt(given: object, prompts: list[object]) -> None:
    assert completion(prompt=given).prompt == prompts


@pytest.mark.parametrize(
    "given", [5, {"a": 1}, ["a", 1], ["a", [1]], [[1], "a"], [1.5], [True], [[["a"]]], [None]]
)
def test_a_prompt_of_another_shape_is_one_error(given: object) -> None:
    with pytest.raises(ValidationError) as refused:
        completion(prompt=given)
    [error] = refused.value.errors()
    assert error["loc"] == ("prompt",)
    assert "list of token ids" in error["msg"]


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": []}])
def test_no_prompt(body: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="Either prompt or prompt_embeds must be provided"):
        CompletionRequest.model_validate(body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"stream_options": {"include_usage": True}},
            "Stream options can only be defined when `stream=True`.",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "`prompt_logprobs` are not available when `stream=True`."),
        (
            {"logit_bias": {"z": 1}},
            "logit_bias contains key(s) that cannot be converted to integer token IDs: ['z']",
        ),
        ({"cache_salt": "a/b"}, "Parameter 'cache_salt' must be at most 128 characters"),
        ({"cache_salt": ""}, "must not be empty"),
        ({"cache_salt": "x" * 129}, "Parameter 'cache_salt' must be at most 128 characters"),
        ({"model": "\ud800"}, "half of a surrogate pair"),
        ({"bad_words": ["\udfff"]}, "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_contradictions_of_both(make: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        make(**fields).to_sampling()
    assert message in refused.value.message


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "when using `top_logprobs`, `logprobs` must be set to true."),
        (
            {"tools": []},
            "`tools` must not be an empty array. Either provide at least one tool or omit the field",
        ),
        ({"tool_choice": "perhaps", "tools": [TOOL]}, "tool_choice is one of none, auto, required"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
    ],
)
def test_contradictions_of_chat(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert message in refused.value.message


def test_tools_alone_are_welcome() -> None:
    assert chat(tools=[TOOL]).tools is not None
    chat(tools=[TOOL], tool_choice="none", parallel_tool_calls=True)
    chat(tools=[TOOL], tool_choice="auto")
    chat(tool_choice="none")


def test_continuing_turns_the_generation_prompt_off() -> None:
    assert chat().add_generation_prompt
    assert not chat(continue_final_message=True).add_generation_prompt


@pytest.mark.parametrize("field", ["stream", "echo", "ignore_eos", "skip_special_tokens", "return_token_ids"])
@pytest.mark.parametrize("value", ["yes", 1, "true"])
def test_flags_are_true_or_false(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match="valid boolean"):
        completion(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "x"),
        ("max_tokens", 1.5),
        ("seed", 2**63),
        ("priority", -(2**63) - 1),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("stream_interval", 0),
        ("stop", 5),
        ("stop", ["a", 1]),
        ("logit_bias", [1]),
        ("stop_token_ids", ["x"]),
        ("temperature", "hot"),
    ],
)
def test_a_wrong_type_is_one_error_at_its_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        completion(**{field: value})
    [error] = refused.value.errors()
    assert error["loc"][0] == field
