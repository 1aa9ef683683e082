"""Fields of bodies: nothing that a client sends is silently ignored."""

from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from server.api.chat import ChatRequest
from server.api.completions import CompletionRequest
from server.api.fields import IGNORES_UNKNOWN, MEANINGLESS, REASONS, UNSUPPORTED, Body
from server.api.tokenize import TokenizeRequest
from server.errors import BadRequest

TEXT = {"prompt": "a"}
TALK = {"messages": [{"role": "user", "content": "a"}]}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({**TEXT, **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({**TALK, **fields})


def refusal_of(make: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        make(**fields)
    return refused.value


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
@pytest.mark.parametrize(("make", "body"), [(completion, CompletionRequest), (chat, ChatRequest)])
def test_an_unsupported_field_is_refused_by_name(make: Any, body: type[Body], name: str) -> None:
    if name in body.model_fields:
        return
    error = refusal_of(make, **{name: {"asks": "for something"}})
    assert error.param == name
    assert f"`{name}` {REASONS.get(name, 'is not supported yet')}" in error.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_an_unsupported_field_may_ask_for_nothing(name: str) -> None:
    completion(**{name: None})
    for neutral in UNSUPPORTED[name]:
        completion(**{name: neutral})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("moderation", {}),
        ("web_search_options", {}),
        ("return_prompt_text", True),
        ("best_of", 2),
    ],
)
def test_what_chat_cannot_do_yet(name: str, value: object) -> None:
    assert refusal_of(chat, **{name: value}).param == name


def test_text_is_the_response_format() -> None:
    completion(response_format={"type": "text"})
    chat(response_format={"type": "text"}, modalities=["text"])


@pytest.mark.parametrize("name", sorted(MEANINGLESS))
@pytest.mark.parametrize("make", [completion, chat])
def test_book_keeping_passes(make: Any, name: str) -> None:
    make(**{name: "anything"})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temprature", "temperature"),
        ("top-p", "top_p"),
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("stops", "stop"),
    ],
)
def test_a_misspelled_field_is_told_its_name(wrong: str, right: str) -> None:
    error = refusal_of(completion, **{wrong: 1})
    assert error.param == wrong
    assert error.message == f"Unknown field: `{wrong}`, did you mean `{right}`?"


def test_a_field_like_no_other_is_sent_to_the_docs() -> None:
    assert "/docs" in refusal_of(completion, zzzzzzzz=1).message


def test_many_unknown_fields_make_a_short_error() -> None:
    error = refusal_of(completion, **{f"{'x' * 10_000}{i}": 1 for i in range(1_000)})
    assert "(and 995 more)" in error.message
    assert len(error.message) < 1_000
    assert error.param is not None and len(error.param) < 100


def test_not_all_of_very_many_unknown_fields_are_counted() -> None:
    assert "(and 1020 more)" in refusal_of(completion, **{f"x{i}": 1 for i in range(5_000)}).message


def test_an_unknown_field_with_half_a_surrogate_can_be_told() -> None:
    error = refusal_of(completion, **{"a\ud800": 1})
    error.message.encode()
    (error.param or "").encode()


def test_nested_options_are_checked_too() -> None:
    error = refusal_of(completion, stream=True, stream_options={"include_usages": True})
    assert "did you mean `include_usage`?" in error.message
    completion(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})


def test_tokenize_knows_its_own_fields_only() -> None:
    with pytest.raises(BadRequest, match="temperature"):
        TokenizeRequest.model_validate({"prompt": "a", "temperature": 1})
    TokenizeRequest.model_validate({"prompt": "a", "user": "me"})


@pytest.mark.parametrize(("best_of", "n", "drawn"), [(None, 3, 3), (3, 3, 3), (1, 1, 1), (5, 2, 5)])
def test_best_of_draws_so_many(best_of: int | None, n: int, drawn: int) -> None:
    sampling = completion(best_of=best_of, n=n).to_sampling()
    assert (sampling.n, sampling.logprobs) == (drawn, 0 if drawn > n else None)


@pytest.mark.parametrize(
    "fields", [{"best_of": 1, "n": 2}, {"best_of": 1000}, {"best_of": 2, "stream": True}]
)
def test_a_wrong_best_of_is_refused(fields: dict[str, int]) -> None:
    assert refusal_of(completion, **fields).param == "best_of"


@pytest.mark.parametrize(
    ("base", "body"),
    [
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (text_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_field_of_openais_client_is_known(base: Any, body: type[Body]) -> None:
    assert {*base.__annotations__} <= {*body.model_fields, *body.unsupported, *body.meaningless}


@pytest.mark.parametrize("fields", [{"zzzz": 1}, {"stream": True, "stream_options": {"zzzz": 1}}])
def test_unknown_fields_are_ignored_if_the_operator_says_so(fields: dict[str, Any]) -> None:
    body = CompletionRequest.model_validate({**TEXT, **fields}, context=IGNORES_UNKNOWN)
    assert not hasattr(body, "zzzz")
    with pytest.raises(BadRequest, match="best_of"):
        CompletionRequest.model_validate({**TEXT, "best_of": -1, **fields}, context=IGNORES_UNKNOWN)


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_user_says_something(content: dict[str, None]) -> None:
    error = refusal_of(chat, messages=[{"role": "assistant"}, {"role": "user", **content}])
    assert error.param == "messages" and "messages[1] has no content" in error.message
