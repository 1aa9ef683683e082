"""Fields of other servers that no transcript shows: each says what one of ours says."""

from typing import Any

import pytest

from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.pooling_bodies import EmbeddingRequest
from server.schemas.unknown_fields import FieldNotes

TALK = {"messages": [{"role": "user", "content": "hi"}]}


def read(kind: Any, body: Any) -> Any:
    return kind.model_validate(body, context=FieldNotes())


def test_a_prompt_that_is_not_to_be_cached_has_a_salt_of_its_own() -> None:
    salts = [read(ChatRequest, {**TALK, "cache_prompt": False}).cache_salt for _ in range(2)]
    assert salts[0] and salts[1] and salts[0] != salts[1]


@pytest.mark.parametrize(
    ("kind", "base"),
    [(ChatRequest, TALK), (CompletionRequest, {"prompt": "a"}), (EmbeddingRequest, {"input": "a"})],
)
def test_names_of_requests_and_adapters(kind: Any, base: dict[str, Any]) -> None:
    terms = read(kind, {**base, "rid": "mine", "lora_path": "tuned"}).terms
    assert (terms.request_id, terms.model) == ("mine", "tuned")


def test_other_names_are_described() -> None:
    described = ChatRequest.model_json_schema()["properties"]
    assert {"n_predict", "repeat_penalty", "reasoning_format"} <= {*described}


@pytest.mark.parametrize(("kind", "base"), [(ChatRequest, TALK), (CompletionRequest, {"prompt": "a"})])
def test_a_length_of_minus_one_fills_the_context(kind: Any, base: dict[str, Any]) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert read(kind, {**base, name: -1}).to_sampling().max_tokens is None
