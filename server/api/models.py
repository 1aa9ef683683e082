"""The response body of GET /v1/models."""

from __future__ import annotations

import msgspec


class Permission(msgspec.Struct, kw_only=True):
    """A permission, as clients of the OpenAI API expect it: everything but training is allowed."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "facet"
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: tuple[str, ...]
    """The tasks that requests may ask for. Clients of OpenAI ignore this field."""
    quantization: str | None = None
    """The form of the weights, if they are quantized. Clients of OpenAI ignore this field."""
    permission: list[Permission]


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
