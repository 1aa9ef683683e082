"""What is read of the body of each endpoint, and how long it may be: one table for all processes."""

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
from server.reading import conversations, prompts, texts
from server.reading.prompts import Conversation, Prompt
from server.reading.reader import Reader
from server.reading.texts import EmbeddedTexts, PredictedTexts, RankedTexts
from server.requests.pooling import Item
from server.requests.scoring import Compared

USUAL_BODY = 4 << 20
"""The longest body in bytes."""
MANY_TEXTS = 16 << 20
"""The longest body of an endpoint that is made for many texts at a time."""

OTHER_BODY = 1 << 20
"""The longest body of an endpoint that reads no texts."""

R = TypeVar("R")


@dataclass(frozen=True)
class Reading(Generic[R]):
    """How the texts of a body become what the engine gets."""

    name: str
    body: Any
    """The type of the body, as pydantic checks it."""
    read: Callable[[Any, Reader], R]
    result: type[R]
    most_bytes: int = USUAL_BODY
    work: Callable[[Any, Reader], int] | None = None
    """Returns the characters of text that are written and tokenized beside those of the body, if there can be
    many."""


COMPLETION = Reading("completion", CompletionRequest, prompts.read_completion, list[Prompt])
CHAT = Reading("chat", ChatRequest, prompts.read_chat, Conversation, work=prompts.work_of_template)
RESPONSES = Reading("responses", ResponsesRequest, conversations.read_response, Conversation)
MESSAGES = Reading("messages", MessagesRequest, conversations.read_messages, Conversation)
COUNT_TOKENS = Reading("count_tokens", CountTokensRequest, conversations.count_tokens, int)
INPUT_TOKENS = Reading("input_tokens", ResponsesRequest, conversations.count_tokens, int)
TOKENIZE = Reading("tokenize", TokenizeRequest, prompts.read_tokenize, bytes, work=prompts.work_of_template)
DETOKENIZE = Reading("detokenize", DetokenizeRequest, prompts.read_detokenize, bytes)

EMBEDDINGS = Reading(
    "embeddings", EmbeddingRequest, texts.read_embeddings, list[Item], MANY_TEXTS, texts.work_of_texts
)
POOLING = Reading("pooling", PoolingRequest, texts.read_pooling, list[Item], MANY_TEXTS, texts.work_of_texts)
CLASSIFY = Reading(
    "classify", ClassifyRequest, texts.read_classify, list[Item], MANY_TEXTS, texts.work_of_texts
)
COHERE = Reading("cohere", CohereRequest, texts.read_cohere, EmbeddedTexts, MANY_TEXTS, texts.work_of_cohere)
EMBED = Reading("embed", EmbedRequest, texts.read_embed, list[Item], MANY_TEXTS, texts.work_of_inputs)
EMBED_ALL = Reading(
    "embed_all", EmbedAllRequest, texts.read_embed_all, list[Item], MANY_TEXTS, texts.work_of_inputs
)
PREDICT = Reading("predict", PredictRequest, texts.read_predict, PredictedTexts, MANY_TEXTS)
SIMILARITY = Reading(
    "similarity", SimilarityRequest, texts.read_similarity, list[Item], MANY_TEXTS, texts.work_of_similarity
)
SCORE = Reading("score", ScoreRequest, texts.read_score, Compared, MANY_TEXTS, texts.work_of_score)
RERANK = Reading("rerank", EitherRerank, texts.read_rerank, RankedTexts, MANY_TEXTS, texts.work_of_rerank)

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
