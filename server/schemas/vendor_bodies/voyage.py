"""Voyage's bodies of /v1/embeddings and /v1/rerank, and its ranking."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import model_validator

from server.errors import BadRequest
from server.schemas.pooling_bodies import EmbeddingRequest
from server.schemas.score_and_rerank import RankedParts, RerankRequest
from server.schemas.vendor_bodies.jina import cut


def _truncation(body: dict[str, Any]) -> dict[str, object]:
    """Too long texts are cut if the body does not say."""
    return cut(True if body.get("truncation") is None else body["truncation"], "truncation")


class VoyageEmbeddingRequest(EmbeddingRequest):
    client_names = {
        "dimensions": "output_dimension",
        "embed_dtype": "output_dtype",
        "truncate_prompt_tokens": "truncation",
    }

    @model_validator(mode="before")
    @classmethod
    def read_theirs(cls, body: object) -> object:
        """The body with our fields in the place of theirs."""
        if not isinstance(body, dict):
            return body
        theirs = ("truncation", "output_dimension", "output_dtype")
        rest: dict[str, Any] = {name: value for name, value in body.items() if name not in theirs}
        size, numbers = body.get("output_dimension"), body.get("output_dtype")
        ours = {} if size is None else {"dimensions": size}
        return {**_truncation(body), **ours, **({} if numbers is None else _numbers(numbers)), **rest}


def _numbers(kind: object) -> dict[str, object]:
    if kind in ("float", "int8", "uint8", "binary", "ubinary"):
        return {"embed_dtype": "float32" if kind == "float" else kind}
    raise BadRequest(
        f"`output_dtype` is float, int8, uint8, binary or ubinary, not {str(kind)[:64]!r}.", "output_dtype"
    )


class VoyageRerank(RerankRequest):
    client_names = {"top_n": "top_k", "truncate_prompt_tokens": "truncation"}

    return_documents: bool | None = False

    @model_validator(mode="before")
    @classmethod
    def read_theirs(cls, body: object) -> object:
        """The body with our fields in the place of theirs."""
        if not isinstance(body, dict):
            return body
        rest = {name: value for name, value in body.items() if name not in ("top_k", "truncation")}
        return {"top_n": body.get("top_k"), **_truncation(body), **rest}

    def write(self, parts: RankedParts) -> VoyageRanking:
        best = parts.best[: self.top_n or None]
        data = [VoyageRanked(index, score, parts.document(index)) for index, score in best]
        return VoyageRanking(data=data, model=parts.model, usage=VoyageUsage(parts.usage.total_tokens))


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
