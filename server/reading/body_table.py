"""The table of endpoints with a body: its type, what is read of its texts, and how long it may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from server.api.chat import ChatRequest
from server.api.cohere import CohereRequest
from server.api.completions import CompletionRequest
from server.api.conversations.anthropic import CountTokensRequest, MessagesRequest
from server.api.conversations.responses import ResponsesRequest
from server.api.pooling_bodies import ClassifyRequest, EmbeddingRequest, PoolingRequest
from server.api.scores import ScoreRequest
from server.api.tei import EitherRerank, EmbedAllRequest, EmbedRequest, PredictRequest, SimilarityRequest
from server.api.tokenize import DetokenizeRequest, TokenizeRequest
from server.reading import prompts, texts
from server.reading.context import ReadingContext
from server.reading.prompts import Conversation, Prompt
from server.reading.texts import ReadTexts
from server.requests.scoring import Compared

USUAL_BODY = 4 << 20
"""The longest body in bytes; and of an endpoint for many texts at a time, and of one that reads none:"""
MANY_TEXTS = 16 << 20
OTHER_BODY = 1 << 20

R = TypeVar("R")


@dataclass(frozen=True)
class Reading(Generic[R]):
    """How the texts of a body become what the engine gets."""

    name: str
    body: Any
    """The type of the body, as pydantic checks it."""
    read: Callable[[Any, ReadingContext], R]
    result: type[R]
    most_bytes: int = USUAL_BODY
    work: Callable[[Any, ReadingContext], int] | None = None
    """Returns the characters of text that are written and tokenized beside those of the body, if there can be
    many."""


COMPLETION = Reading("completion", CompletionRequest, prompts.read_completion, list[Prompt])
CHAT = Reading("chat", ChatRequest, prompts.read_chat, Conversation, work=prompts.work_of_template)
RESPONSES = Reading("responses", ResponsesRequest, prompts.read_response, Conversation)
MESSAGES = Reading("messages", MessagesRequest, prompts.read_messages, Conversation)
COUNT_TOKENS = Reading("count_tokens", CountTokensRequest, prompts.count_tokens, int)
INPUT_TOKENS = Reading("input_tokens", ResponsesRequest, prompts.count_tokens, int)
TOKENIZE = Reading("tokenize", TokenizeRequest, prompts.read_tokenize, bytes, work=prompts.work_of_template)
DETOKENIZE = Reading("detokenize", DetokenizeRequest, prompts.read_detokenize, bytes)


def _pooling(name: str, body: Any) -> Reading[ReadTexts]:
    return Reading(name, body, texts.read_texts, ReadTexts, MANY_TEXTS, texts.work_of_texts)


def _comparing(name: str, body: Any) -> Reading[Compared]:
    return Reading(name, body, texts.read_compared, Compared, MANY_TEXTS, texts.work_of_compared)


EMBEDDINGS = _pooling("embeddings", EmbeddingRequest)
POOLING = _pooling("pooling", PoolingRequest)
CLASSIFY = _pooling("classify", ClassifyRequest)
COHERE = _pooling("cohere", CohereRequest)
EMBED = _pooling("embed", EmbedRequest)
EMBED_ALL = _pooling("embed_all", EmbedAllRequest)
SIMILARITY = _pooling("similarity", SimilarityRequest)
PREDICT = Reading("predict", PredictRequest, texts.read_predict, ReadTexts, MANY_TEXTS)
SCORE = _comparing("score", ScoreRequest)
RERANK = _comparing("rerank", EitherRerank)

BY_PATH: dict[str, Reading[Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": INPUT_TOKENS,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/embeddings": EMBEDDINGS,
    "/pooling": POOLING,
    "/classify": CLASSIFY,
    "/v2/embed": COHERE,
    "/embed": EMBED,
    "/embed_all": EMBED_ALL,
    "/predict": PREDICT,
    "/similarity": SIMILARITY,
    "/score": SCORE,
    "/v1/score": SCORE,
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
}

BY_NAME: dict[str, Reading[Any]] = {reading.name: reading for reading in BY_PATH.values()}
