"""Voyage's body and answer of /v1/rerank, which has `top_k` or `truncation`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import model_validator

from server.api.dialects.jina import cut
from server.api.scores import RerankRequest

_THEIRS = ("top_k", "truncation")


class VoyageRerank(RerankRequest):
    return_documents: bool | None = False

    @model_validator(mode="before")
    @classmethod
    def read_theirs(cls, body: object) -> object:
        """The body with our fields in the place of theirs. Too long texts are cut if it does not say."""
        if not isinstance(body, dict):
            return body
        rest: dict[str, Any] = {name: value for name, value in body.items() if name not in _THEIRS}
        cuts = True if body.get("truncation") is None else body["truncation"]
        return {"top_n": body.get("top_k"), **cut(cuts), **rest}


def is_voyages(body: object) -> bool:
    return isinstance(body, dict) and any(name in body for name in _THEIRS)


class VoyageRanked(msgspec.Struct):
    index: int
    relevance_score: float
    document: msgspec.Raw | UnsetType = UNSET


class VoyageUsage(msgspec.Struct):
    total_tokens: int


class VoyageRanking(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[VoyageRanked]
    model: str
    usage: VoyageUsage
