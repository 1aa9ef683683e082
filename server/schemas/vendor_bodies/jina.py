"""Jina's fields of /v1/embeddings: task, embedding_type, truncate, and objects as inputs."""

from __future__ import annotations

from typing import Any

from server.errors import BadRequest

_PURPOSES = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "separation": "clustering",
    "text-matching": None,
}
"""Tasks, and the purposes of texts that we call so: text-matching reads them with the default prompt."""


def _purpose(task: object) -> dict[str, object]:
    if task == "embed":  # what vLLM's /pooling calls the work of this path
        return {}
    if not isinstance(task, str):
        raise BadRequest("`task` is the purpose of the texts, such as 'retrieval.query'.", "task")
    return {"input_type": _PURPOSES.get(task, task), "task": task}


def _encoding(kind: object) -> dict[str, object]:
    if kind in ("float", "base64"):
        return {"encoding_format": kind}
    if kind in ("binary", "ubinary"):
        return {"embed_dtype": kind}
    raise BadRequest(
        f"`embedding_type` is float, base64, binary or ubinary, not {str(kind)[:64]!r}; POST /v2/embed makes "
        "several kinds at once.",
        "embedding_type",
    )


def cut(whether: object, field: str = "truncate") -> dict[str, object]:
    """Whether too long a text is cut; without it, it is refused."""
    if not isinstance(whether, bool):
        raise BadRequest(f"`{field}` is true or false.", field)
    return {"truncate_prompt_tokens": -1} if whether else {}


JINA = {"task": _purpose, "embedding_type": _encoding, "truncate": cut}
"""For each field of Jina's, what ours says in its place."""


def read_jina(body: dict[str, Any]) -> dict[str, Any]:
    """The body with our fields in the place of Jina's. If ours is given, too, it holds."""
    if body.keys().isdisjoint(JINA):
        return _read_inputs(body)
    ours: dict[str, Any] = {}
    for name, value in body.items():
        if name in JINA and value is not None:
            ours |= JINA[name](value)
    rest = {name: value for name, value in body.items() if name not in JINA}
    if rest.get("input_type") is not None:
        ours.pop("task", None)  # which says nothing then
    return _read_inputs({**ours, **rest})


def _read_inputs(body: dict[str, Any]) -> dict[str, Any]:
    """The body with texts, or URLs of pictures, in the place of objects that hold one of them."""
    given = body.get("input")
    inputs: list[Any] = given if isinstance(given, list) else []
    for name, modality in (("text", "text"), ("image", "image")):
        if inputs and all(isinstance(one, dict) and [*one] == [name] for one in inputs):
            return {**body, "input": [one[name] for one in inputs], "modality": modality}
    return body
