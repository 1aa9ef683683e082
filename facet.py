"""The public names: `from facet import LLM, SamplingParams, PoolingParams, register_model`.

Imported lazily, so that naming one does not load the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.registry import register_model
    from server.offline.llm import LLM
    from server.requests.pooling import PoolingParams
    from server.requests.sampling import SamplingParams

__all__ = ["LLM", "PoolingParams", "SamplingParams", "register_model"]

_HOMES = {
    "LLM": "server.offline.llm",
    "PoolingParams": "server.requests.pooling",
    "SamplingParams": "server.requests.sampling",
    "register_model": "models.registry",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"facet has no {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)
