"""Infinity's bodies and answers of /rerank and /classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import model_validator

from server.errors import BadRequest
from server.schemas.sampling_fields import Usage
from server.schemas.score_and_rerank import ClassifyRequest, RankedParts, RerankRequest

_RAW = "raw_scores"


def _activation_of(body: object) -> object:
    """The body with our `use_activation` in the place of `raw_scores`."""
    if not isinstance(body, dict) or _RAW not in body:
        return body
    raw = body[_RAW]
    if not isinstance(raw, bool | None):
        raise BadRequest("`raw_scores` is true or false.", _RAW)
    rest: dict[str, Any] = {name: value for name, value in body.items() if name != _RAW}
    return {"use_activation": False, **rest} if raw else rest


class InfinityRerank(RerankRequest):
    client_names = {"use_activation": _RAW}

    return_documents: bool | None = False

    @model_validator(mode="before")
    @classmethod
    def read_raw_scores(cls, body: object) -> object:
        return _activation_of(body)

    def write(self, parts: RankedParts) -> InfinityRanking:
        best = parts.best[: self.top_n or None]
        return InfinityRanking(
            id=parts.id,
            model=parts.model,
            created=parts.created,
            usage=parts.usage,
            results=[InfinityRanked(index, score, parts.document(index)) for index, score in best],
        )


class InfinityClassify(ClassifyRequest):
    client_names = {"use_activation": _RAW}

    @model_validator(mode="before")
    @classmethod
    def read_raw_scores(cls, body: object) -> object:
        return _activation_of(body)


class InfinityRanked(msgspec.Struct):
    index: int
    relevance_score: float
    document: msgspec.Raw | UnsetType = UNSET


class InfinityRanking(msgspec.Struct, kw_only=True):
    object: str = "rerank"
    id: str
    model: str
    created: int
    usage: Usage
    results: list[InfinityRanked]


class LabelScore(msgspec.Struct):
    label: str
    score: float


def label_scores(probs: Sequence[float], labels: Sequence[str]) -> list[LabelScore]:
    """The labels of a text with their scores, the highest first."""
    names = labels or [f"LABEL_{index}" for index in range(len(probs))]
    found = [LabelScore(name, score) for name, score in zip(names, probs, strict=True)]
    return sorted(found, key=lambda one: -one.score)


class InfinityClasses(msgspec.Struct, kw_only=True):
    object: str = "classify"
    id: str
    model: str
    created: int
    usage: Usage
    data: list[list[LabelScore]]
