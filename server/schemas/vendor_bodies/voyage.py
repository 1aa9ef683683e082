"""Voyage's bodies of /v1/embeddings and /v1/rerank, and its ranking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import BadRequest
from server.schemas.body import ForeignField
from server.schemas.pooling_bodies import EmbeddingRequest, MostTokens
from server.schemas.score_and_rerank import RankedParts, RerankRequest
from server.schemas.unknown_fields import FieldNotes
from server.schemas.vendor_bodies.foreign_fields import ADAPTER_FIELDS
from server.schemas.vendor_bodies.jina import cut


def _truncation(value: Any, notes: FieldNotes) -> dict[str, Any]:
    return {"truncate_prompt_tokens": None, **cut(value, "truncation")}


def _numbers(kind: Any, notes: FieldNotes) -> dict[str, Any]:
    if kind in ("float", "int8", "uint8", "binary", "ubinary"):
        return {"embed_dtype": "float32" if kind == "float" else kind}
    raise BadRequest(
        f"`output_dtype` is float, int8, uint8, binary or ubinary, not {str(kind)[:64]!r}.", "output_dtype"
    )


_FIELDS: Mapping[str, ForeignField] = {
    **ADAPTER_FIELDS,
    "truncation": ForeignField(_truncation, "false: a text that is too long is refused, and not cut."),
}


class VoyageEmbeddingRequest(EmbeddingRequest):
    other_names = {**EmbeddingRequest.other_names, "output_dimension": "dimensions"}
    foreign = {**_FIELDS, "output_dtype": ForeignField(_numbers, "embed_dtype; float is float32.")}

    truncate_prompt_tokens: MostTokens | None = -1


class VoyageRerank(RerankRequest):
    other_names = {**RerankRequest.other_names, "top_k": "top_n"}
    foreign = _FIELDS

    return_documents: bool | None = False
    truncate_prompt_tokens: MostTokens | None = -1

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
