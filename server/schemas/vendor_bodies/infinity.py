"""Infinity's bodies and answers of /rerank and /classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import BadRequest
from server.schemas.body import ForeignField
from server.schemas.sampling_fields import Usage
from server.schemas.score_and_rerank import ClassifyRequest, RankedParts, RerankRequest
from server.schemas.unknown_fields import FieldNotes


def _use_activation(raw: Any, notes: FieldNotes) -> dict[str, Any]:
    if not isinstance(raw, bool):
        raise BadRequest("`raw_scores` is true or false.", "raw_scores")
    return {"use_activation": False} if raw else {}


_RAW_SCORES = {"raw_scores": ForeignField(_use_activation, "true is use_activation: false.")}


class InfinityRerank(RerankRequest):
    foreign = {**RerankRequest.foreign, **_RAW_SCORES}

    return_documents: bool | None = False

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
    foreign = {**ClassifyRequest.foreign, **_RAW_SCORES}


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
