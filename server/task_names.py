"""The tasks that requests may ask for: their names, other names for them, and their endpoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, cast

from models.pooling.config import PoolingConfig
from server.errors import BadRequest
from worker.protocol import Task

GENERATE = "generate"

ScoreType = Literal["cross-encoder", "bi-encoder", "late-interaction"]
"""How two texts are compared: read together, by one vector each, or by one vector for each token."""

_ENDPOINTS = {
    GENERATE: "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "token_embed": "/pooling",
    "classify": "/classify",
    "token_classify": "/pooling",
}
POOLING: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify")
"""The pooling tasks, in the order in which one is chosen where a request names none."""

_ALIASES: dict[str, tuple[Task, ...]] = {
    "encode": ("token_embed", "token_classify"),
    "score": ("classify",),
    "reward": ("token_classify", "classify"),
    "embedding": ("embed",),
}
"""Names that vLLM 0.11 and older used, and the tasks that each may mean: the first that the model does."""

_SCORED_BY: dict[Task, ScoreType] = {
    "classify": "cross-encoder",
    "embed": "bi-encoder",
    "token_embed": "late-interaction",
}


def find_task(name: str | None, tasks: Collection[str], preferred: Task | None = None) -> Task:
    """The task that a request calls `name`. None is the model's preferred task, or else its first."""
    if name is None:
        offered = [task for task in (preferred, *POOLING) if task in tasks]
        if not offered:
            raise no_task("pooling", tasks)
        return cast(Task, offered[0])
    if name not in POOLING and name not in _ALIASES:
        known = ", ".join((*POOLING, *_ALIASES))
        raise BadRequest(f"Unsupported task: {name[:64]!r}. Tasks are {known}.", "task")
    found = [task for task in _ALIASES.get(name, (name,)) if task in tasks]
    if not found:
        raise no_task(name, tasks)
    return cast(Task, found[0])


def require_task(task: str, tasks: Collection[str]) -> None:
    if task not in tasks:
        raise no_task(task, tasks)


def no_task(wanted: str, tasks: Collection[str]) -> BadRequest:
    """The error for a task that the model does not do. It names the right endpoint or kind of model."""
    offered = ", ".join(f"{task} (POST {_ENDPOINTS[task]})" for task in tasks if task in _ENDPOINTS)
    return BadRequest(
        f"This model does not do the task {wanted!r}. It does: {offered or 'nothing'}."
        + _way_to_offer(wanted, tasks)
    )


def _way_to_offer(wanted: str, tasks: Collection[str]) -> str:
    """Why a model that could do a task for single tokens does not offer it, and how it would."""
    able = [task for task in _ALIASES.get(wanted, (wanted,)) if task.removeprefix("token_") in tasks]
    if GENERATE not in tasks or not able or not able[0].startswith("token_"):
        return ""
    return (
        " Beside generation, tasks for single tokens keep states of whole texts, so they are offered only "
        f"if the server is started with --tasks {','.join((*tasks, able[0]))}."
    )


def score_type(tasks: Collection[str], pooling: PoolingConfig) -> ScoreType | None:
    """The kind of comparison that the model computes; None if it cannot compare texts."""
    if pooling.task in _SCORED_BY and pooling.task in tasks:
        return _SCORED_BY[pooling.task]
    if "classify" in tasks and pooling.num_labels == 1:
        return "cross-encoder"
    made_for_tokens = bool(pooling.token_steps) and not pooling.modes  # such as ColBERT
    if "token_embed" in tasks and (made_for_tokens or "embed" not in tasks):
        return "late-interaction"
    return "bi-encoder" if "embed" in tasks else None


def no_scores(tasks: Collection[str], num_labels: int) -> BadRequest:
    if "classify" in tasks:
        return BadRequest(
            "Scores need a classifier with one label, or vectors to compare; this model is a classifier with "
            f"{num_labels} labels. Use POST /classify."
        )
    return no_task("score", tasks)
