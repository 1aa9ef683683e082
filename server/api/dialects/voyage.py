"""Voyage's fields of /v1/embeddings: `truncation`, `output_dimension`, `output_dtype`."""

from __future__ import annotations

from server.api.dialects.jina import cut
from server.errors import BadRequest


def _numbers(kind: object) -> dict[str, object]:
    if kind in ("float", "int8", "uint8", "binary", "ubinary"):
        return {"embed_dtype": "float32" if kind == "float" else kind}
    raise BadRequest(
        f"`output_dtype` is float, int8, uint8, binary or ubinary, not {str(kind)[:64]!r}.", "output_dtype"
    )


VOYAGE = {"truncation": cut, "output_dimension": lambda size: {"dimensions": size}, "output_dtype": _numbers}
