"""Fields of other servers: each says what one of ours says."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.conversations.anthropic import MessagesRequest
from server.schemas.conversations.responses import ResponsesRequest
from server.schemas.ollama.requests import OllamaChatRequest
from server.schemas.pooling_bodies import EmbeddingRequest
from server.schemas.unknown_fields import FieldNotes

TALK = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "a"}
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def read(kind: Any, body: Any) -> tuple[Any, FieldNotes]:
    notes = FieldNotes()
    return kind.model_validate(body, context=notes), notes


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({"num_return_sequences": 2}, {"n": 2}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"sampling_seed": 5}, {"seed": 5}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"rid": "mine"}, {"request_id": "mine"}),
        ({"lora_path": "tuned"}, {"model": "tuned"}),
        ({"lora_path": "", "model": "base"}, {"model": "base"}),
        ({"repeat_last_n": -1, "repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1}, NO_PENALTIES),
        ({"options": {"typical_p": 0.5}}, {"typical_p": 0.5}),
        ({"cache_prompt": True, "keep_alive": "5m", "return_token_offsets": False}, {}),
        (
            {"temperature": 1, "options": {"temperature": 0.5, "num_predict": 9, "repeat_penalty": 1.5}},
            {"temperature": 1, "max_tokens": 9, "repetition_penalty": 1.5},
        ),
        (
            {"options": {"stop": "x", "repeat_last_n": 0, "num_gpu": 9, "keep": None}},
            {"stop": ["x"], **NO_PENALTIES},
        ),
    ],
)
@pytest.mark.parametrize(("kind", "base"), [(ChatRequest, TALK), (CompletionRequest, TEXT)])
def test_a_field_says_what_ours_says(
    kind: Any, base: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    body, notes = read(kind, {**base, **theirs})
    assert body.to_sampling() == kind.model_validate({**base, **ours}).to_sampling()
    assert body.terms == kind.model_validate({**base, **ours}).terms
    assert notes.foreign == ["keep"] * ("keep" in theirs.get("options", ()))


@pytest.mark.parametrize(("kind", "base"), [(ChatRequest, TALK), (CompletionRequest, TEXT)])
def test_a_negative_n_predict_fills_the_context(kind: Any, base: dict[str, Any]) -> None:
    assert read(kind, {**base, "n_predict": -1})[0].to_sampling().max_tokens is None


def test_a_prompt_that_is_not_to_be_cached_has_a_salt_of_its_own() -> None:
    salts = [read(ChatRequest, {**TALK, "cache_prompt": False})[0].cache_salt for _ in range(2)]
    assert salts[0] and salts[1] and salts[0] != salts[1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"enable_thinking": True, "thinking_token_budget": 9},
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking_budget": 9}, {"thinking_token_budget": 9}),
        ({"thinking": {"type": "adaptive", "budget": 0}}, {"thinking_token_budget": 0}),
        ({"reasoning_format": "none"}, {"separate_reasoning": False}),
        ({"reasoning_format": "raw"}, {"separate_reasoning": False}),
        ({"reasoning_format": "hidden"}, {"include_reasoning": False}),
        ({"reasoning_format": "deepseek"}, {}),
    ],
)
def test_fields_on_reasoning(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    body, wanted = read(ChatRequest, {**TALK, **theirs})[0], ChatRequest.model_validate({**TALK, **ours})
    assert body.style == wanted.style
    fields = ("thinking_token_budget", "separate_reasoning", "include_reasoning")
    assert [getattr(body, name) for name in fields] == [getattr(wanted, name) for name in fields]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"repeat_last_n": 64}, ["repeat_last_n"]),
        ({"return_token_offsets": True}, ["return_token_offsets"]),
        (
            {"options": {"num_ctx": 2048, "repeat_last_n": 64, "tfs_z": 2}},
            ["repeat_last_n", "tfs_z", "options.num_ctx"],
        ),
    ],
)
def test_what_has_no_effect_is_told(body: dict[str, Any], told: list[str]) -> None:
    assert sorted(read(ChatRequest, {**TALK, **body})[1].foreign) == sorted(told)
    with pytest.raises(BadRequest, match="has no effect"):
        ChatRequest.model_validate({**TALK, **body}, context=FieldNotes(strict=True))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"n_predict": 3, "n": 0, "num_return_sequences": 2}, "`num_return_sequences` and `n` say different"),
        ({"cache_prompt": 1}, "`cache_prompt` is true or false"),
        ({"reasoning_format": "loud"}, "`reasoning_format` is one of auto"),
        ({"lora_path": ["a", "b"]}, "`lora_path` is the name of one adapter"),
        ({"options": {"temperature": "hot"}}, r"body\.options\.temperature"),
        ({"options": {"temprature": 1}}, "did you mean `temperature`"),
        ({"thinking": {"type": "on"}}, r"thinking\.type"),
        (
            {"thinking": {"type": "enabled"}, "enable_thinking": False},
            "`thinking.type` and `enable_thinking`",
        ),
        ({"stop_sequences": ["x"] * 99}, "`stop` may hold at most"),
    ],
)
def test_what_is_wrong_is_refused(body: dict[str, Any], error: str) -> None:
    with pytest.raises((BadRequest, ValueError), match=error):
        read(ChatRequest, {**TALK, **body})


def test_responses_have_fields_of_chat_completions() -> None:
    fields: dict[str, Any] = {
        "structured_outputs": {"regex": "a+"},
        "logit_bias": {"5": 1.0},
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    body = read(ResponsesRequest, {"input": "a", "max_tokens": 9, **fields})[0]
    assert body.max_output_tokens == 9
    params, asked = body.chat.to_sampling(), body.chat.asked_form()
    assert (params.logit_bias, params.stop_token_ids, params.ignore_eos) == ({5: 1.0}, [7], True)
    assert asked is not None and asked.params.regex == "a+"


def test_messages_have_fields_of_chat_completions() -> None:
    fields = {"chat_template_kwargs": {"a": 1}, "cache_salt": "mine"}
    chat = read(MessagesRequest, {"model": "m", "max_tokens": 9, **TALK, **fields})[0].chat
    assert (chat.chat_template_kwargs, chat.terms.salt) == ({"a": 1}, "mine")


def test_ollamas_window_of_penalties_may_be_empty() -> None:
    options = {"repeat_penalty": 1.5, "repeat_last_n": 0}
    params = read(OllamaChatRequest, {"model": "m", **TALK, "options": options})[0].chat.to_sampling()
    assert params.repetition_penalty == 1.0


def test_an_error_names_what_was_sent_at_the_side_of_ollamas_object() -> None:
    body = {**TALK, "temperature": 1, "options": {"temperature": 2, "repeat_penalty": 1.5}}
    assert read(ChatRequest, body)[1].names == {"repetition_penalty": "options.repeat_penalty"}


def test_endpoints_that_pool_take_some_too() -> None:
    terms = read(EmbeddingRequest, {"input": "a", "rid": "mine", "lora_path": "tuned"})[0].terms
    assert (terms.request_id, terms.model) == ("mine", "tuned")


def test_other_names_are_described() -> None:
    described = ChatRequest.model_json_schema()["properties"]
    assert {"n_predict", "repeat_penalty", "reasoning_format"} <= {*described}
