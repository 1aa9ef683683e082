"""Bounds of bodies: long lists are refused before their entries are read, wrong ones at their first entry."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from server.errors import BadRequest
from server.schemas.body import Body
from server.schemas.chat import ChatRequest
from server.schemas.cohere_embed import CohereRequest
from server.schemas.completions import CompletionRequest
from server.schemas.messages import MAX_MESSAGES
from server.schemas.pooling_bodies import EmbeddingRequest
from server.schemas.score_and_rerank import RerankRequest, ScoreRequest
from server.schemas.tei import EmbedRequest, PredictRequest, SimilarityRequest, TextsRequest
from server.schemas.tokenize import DetokenizeRequest

TALK = {"messages": [{"role": "user", "content": "a"}]}
TEXT = {"prompt": "a"}
TOOL = {"function": {"name": "f"}}


class Unreadable(list[object]):
    """A list whose entries nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError("the entries of a list that is too long were read")


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (ChatRequest, {**TALK, "tools": [TOOL] * 129}, "`tools` may hold at most 128 tools, got 129."),
        (ChatRequest, {**TALK, "documents": [{}] * 1025}, "`documents` may hold at most 1024 documents"),
        (ChatRequest, {**TALK, "stop": ["a"] * 17}, "`stop` may hold at most 16 strings, got 17."),
        (
            ChatRequest,
            {**TALK, "chat_template_kwargs": {f"a{i}": 1 for i in range(129)}},
            "`chat_template_kwargs` may hold at most 128 arguments, got 129.",
        ),
        (CompletionRequest, {"prompt": ["a"] * 257}, "`prompt` may hold at most 256 prompts, got 257."),
        (CompletionRequest, {"prompt": [[1]] * 257}, "`prompt` may hold at most 256 prompts, got 257."),
        (CompletionRequest, {**TEXT, "logit_bias": {f"{i}": 1 for i in range(1025)}}, "at most 1024 entries"),
        (CompletionRequest, {**TEXT, "bad_words": ["a"] * 129}, "at most 128 words, got 129."),
        (CompletionRequest, {**TEXT, "stop_token_ids": [1] * 1025}, "at most 1024 ids, got 1025."),
        (CompletionRequest, {**TEXT, "allowed_token_ids": [1] * 262145}, "at most 262144 ids, got 262145."),
        (EmbeddingRequest, {"input": ["a"] * 16385}, "`input` may hold at most 16384 texts, got 16385."),
        (EmbeddingRequest, {"input": [[1]] * 16385}, "`input` may hold at most 16384 texts, got 16385."),
        (EmbeddingRequest, {"messages": [TALK["messages"]] * 16385}, "at most 16384 conversations"),
        (EmbeddingRequest, {"input": [TALK["messages"]] * 16385}, "at most 16384 conversations"),
        (EmbeddingRequest, {"messages": [TALK["messages"] * 4096] * 17}, "at most 65536 messages in all"),
        (CohereRequest, {"texts": ["a"] * 16385}, "`texts` may hold at most 16384 texts, got 16385."),
        (ScoreRequest, {"text_1": "a", "text_2": ["b"] * 16385}, "`text_2` may hold at most 16384 texts"),
        (RerankRequest, {"query": "a", "documents": ["b"] * 16385}, "`documents` may hold at most 16384"),
        (TextsRequest, {"query": "a", "texts": ["b"] * 16385}, "`texts` may hold at most 16384 texts"),
        (EmbedRequest, {"inputs": ["a"] * 16385}, "may hold at most 16384 texts, got 16385."),
        (PredictRequest, {"inputs": [["a"]] * 16385}, "`inputs` may hold at most 16384 texts, got 16385."),
        (
            SimilarityRequest,
            {"inputs": {"source_sentence": "a", "sentences": ["b"] * 16385}},
            "`sentences` may hold at most 16384 texts",
        ),
    ],
)
def test_too_many_entries(kind: type[Body], body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as refused:
        kind.model_validate(body)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {**TALK, "tools": [TOOL] * 128}),
        (CompletionRequest, {"prompt": ["a"] * 256}),
        (CompletionRequest, {"prompt": [1] * 257}),
        (EmbeddingRequest, {"input": ["a"] * 16384}),
        (EmbeddingRequest, {"input": [1] * 16385}),
        (EmbeddingRequest, {"messages": [TALK["messages"]] * 16384}),
    ],
)
def test_as_many_as_allowed(kind: type[Body], body: dict[str, Any]) -> None:
    kind.model_validate(body)


def test_entries_of_too_long_a_list_are_not_read() -> None:
    with pytest.raises(BadRequest, match="`stop` may hold"):
        CompletionRequest.model_validate({**TEXT, "stop": ["a"] * 17, "bad_words": Unreadable([1] * 999)})


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (CompletionRequest, {**TEXT, "stop": [1] * 16}, ("stop", 0)),
        (CompletionRequest, {**TEXT, "stop_token_ids": [1, *["x"] * 900]}, ("stop_token_ids", 1)),
        (CompletionRequest, {**TEXT, "allowed_token_ids": ["x"] * 200_000}, ("allowed_token_ids", 0)),
        (ChatRequest, {"messages": [1] * 4000}, ("messages", 0)),
        (ChatRequest, {"messages": TALK["messages"] * (MAX_MESSAGES + 1)}, ("messages",)),
        (ChatRequest, {**TALK, "documents": [1] * 1000}, ("documents", 0)),
        (CohereRequest, {"texts": [1] * 16000}, ("texts", 0)),
        (DetokenizeRequest, {"tokens": ["x"] * 100_000}, ("tokens", 0)),
    ],
)
def test_a_list_has_one_error(kind: type[Body], body: dict[str, Any], place: tuple[str | int, ...]) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(body)
    [error] = refused.value.errors()
    assert error["loc"] == place


def test_old_names_of_a_field_are_not_written_out_to_be_compared() -> None:
    class Unprintable:
        def __repr__(self) -> str:
            raise AssertionError("a value that may be very long was written out")

    with pytest.raises(BadRequest, match="different things"):
        EmbeddingRequest.model_validate({"input": "a", "normalize": Unprintable(), "use_activation": True})
