"""Fields that an endpoint does not have: slips are refused, others let through and told."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.schemas.body import invalid_body
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.conversations.anthropic import MessagesRequest
from server.schemas.conversations.responses import ResponsesRequest
from server.schemas.ollama.requests import OllamaChatRequest
from server.schemas.pooling_bodies import EmbeddingRequest
from server.schemas.score_and_rerank import RerankRequest, ScoreRequest
from server.schemas.tei import EmbedRequest
from server.schemas.unknown_fields import FieldNotes, in_clients_words

TALK = {"messages": [{"role": "user", "content": "hi"}]}


def read(body: Any, kind: Any = CompletionRequest, *, strict: bool = False) -> tuple[Any, FieldNotes]:
    notes = FieldNotes(strict)
    return kind.model_validate(body, context=notes), notes


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),  # a letter is missing
        ("max_tokenss", "max_tokens"),  # there is one too many
        ("tempreature", "temperature"),  # two have changed places
        ("temperatore", "temperature"),  # one is another
        ("max_token", "max_tokens"),
        ("prompts", "prompt"),
        ("Temperature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("N", "n"),
        ("frequency_penalties", "frequency_penalty"),
        ("repeat_penality", "repeat_penalty"),  # a name that is not ours
    ],
)
def test_a_slip_is_told_the_name_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(BadRequest, match=f"`{name}`, did you mean `{meant}`") as refused:
        read({"prompt": "a", name: 1})
    assert refused.value.param == name


@pytest.mark.parametrize(
    "name", ["zzzz", "top_a", "models", "mode", "typical", "m", "rep_pen", "enable_search", "x" * 99]
)
def test_a_field_that_nobody_knows_is_let_through_and_told(name: str) -> None:
    body, notes = read({**TALK, name: {"a": 1}}, ChatRequest)
    assert not hasattr(body, name)
    assert notes.foreign == [name[:64]]
    assert name[:64] in notes.warning
    with pytest.raises(BadRequest, match="Unknown field"):
        read({**TALK, name: 1}, ChatRequest, strict=True)


BODIES: list[tuple[Any, dict[str, Any]]] = [
    (ChatRequest, {**TALK, "stream": True, "stream_options": {}}),
    (ChatRequest, {**TALK, "reasoning": {}}),
    (ResponsesRequest, {"input": "a", "text": {}}),
    (MessagesRequest, {"model": "m", "max_tokens": 1, **TALK, "thinking": {"type": "enabled"}}),
    (OllamaChatRequest, {"model": "m", "options": {}}),
    (EmbeddingRequest, {"input": "a"}),
    (RerankRequest, {"query": "a", "documents": ["b"]}),
    (ScoreRequest, {"text_1": "a", "text_2": "b"}),
    (EmbedRequest, {"inputs": "a"}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_bodies_of_all_apis_and_what_is_in_them_follow_one_rule(kind: Any, body: dict[str, Any]) -> None:
    inside = next((value for value in reversed(body.values()) if isinstance(value, dict)), body)
    inside["zzzz"] = 1
    assert read(body, kind)[1].foreign == ["zzzz"]
    with pytest.raises(BadRequest, match="zzzz"):
        read(body, kind, strict=True)


def test_what_has_no_notes_may_have_no_unknown_field() -> None:
    with pytest.raises(BadRequest, match="zzzz"):
        CompletionRequest.model_validate({"prompt": "a", "zzzz": 1})


def test_too_many_unknown_fields_are_not_compared() -> None:
    with pytest.raises(BadRequest, match=r"and 60 more"):
        read({"prompt": "a", **{f"x{i}": 1 for i in range(65)}})


@pytest.mark.parametrize(
    ("param", "message", "told"),
    [
        ("stop", "stop cannot be (parameter=stop)", "stop_sequences cannot be (parameter=stop_sequences)"),
        ("body.stop", "'loc': 'body.stop'", "'loc': 'body.stop_sequences'"),
        ("n", "leave `stop` out, or it will stop", "leave `stop_sequences` out, or it will stop"),
    ],
)
def test_an_error_calls_fields_as_the_client_does(param: str, message: str, told: str) -> None:
    error = BadRequest(message, param)
    for _ in range(2):
        in_clients_words(error, {"stop": "stop_sequences"})
        assert error.message == error.sentence == told
        assert error.param == param.replace("stop", "stop_sequences", 1)


def test_a_wrong_type_is_told_with_the_clients_name_too() -> None:
    error = invalid_body(
        [{"type": "int_type", "msg": "Input should be", "loc": ("max_tokens",), "input": "x"}]
    )
    in_clients_words(error, {"max_tokens": "n_predict"})
    assert error.param == "body.n_predict"
    assert "max_tokens" not in error.message + error.sentence


def test_options_of_a_stream_that_say_nothing_need_none() -> None:
    assert not ChatRequest.model_validate({**TALK, "stream_options": {}}).stream
    with pytest.raises(BadRequest, match="Stream options"):
        ChatRequest.model_validate({**TALK, "stream_options": {"include_usage": False}})
