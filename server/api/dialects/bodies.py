"""Bodies of other APIs at paths of ours: their fields become ours before they are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.api.dialects.jina import JINA, cut, read_inputs
from server.errors import BadRequest

# Voyage's fields of /v1/embeddings: `truncation`, `output_dimension`, `output_dtype`.


def _numbers(kind: object) -> dict[str, object]:
    if kind in ("float", "int8", "uint8", "binary", "ubinary"):
        return {"embed_dtype": "float32" if kind == "float" else kind}
    raise BadRequest(
        f"`output_dtype` is float, int8, uint8, binary or ubinary, not {str(kind)[:64]!r}.", "output_dtype"
    )


VOYAGE = {"truncation": cut, "output_dimension": lambda size: {"dimensions": size}, "output_dtype": _numbers}


Fields = Mapping[str, Callable[[Any], dict[str, object]]]
"""For each field of theirs, what ours says in its place."""


def read_dialects(body: dict[str, Any]) -> dict[str, Any]:
    """The body with our fields in the place of Jina's and Voyage's. If ours is given, too, it holds."""
    theirs: Fields = {**JINA, **VOYAGE}
    if not any(name in theirs for name in body):
        return read_inputs(body)
    ours: dict[str, Any] = {}
    for name, value in body.items():
        if name in theirs and value is not None:
            ours |= theirs[name](value)
    rest = {name: value for name, value in body.items() if name not in theirs}
    if rest.get("input_type") is not None:
        ours.pop("task", None)  # which says nothing then
    return read_inputs({**ours, **rest})
