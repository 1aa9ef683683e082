"""The public names, such as `from facet import LLM, SamplingParams`; `__all__` below lists them.

They are imported when they are first asked for, so that naming one does not load the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.plugins import register_model
    from models.pooling.config import PoolerConfig
    from models.registry import ModelRegistry
    from server.errors import ApiError, BadRequest, Unavailable
    from server.grammars.form_grammar import StructuredOutputsParams
    from server.offline.async_llm import AsyncLLM, AsyncLLMEngine
    from server.offline.llm import LLM
    from server.offline.llm_engine import LLMEngine
    from server.offline.prompt_forms import TextPrompt, TokensPrompt
    from server.offline.request_outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from server.options.server_options import AsyncEngineArgs, EngineArgs
    from server.requests.beam_search import BeamSearchParams
    from server.requests.pooling import PoolingParams
    from server.requests.sampling import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "ApiError",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BadRequest",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "ModelRegistry",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Unavailable",
    "register_model",
]

_HOMES = {
    "LLM": "server.offline.llm",
    "ApiError": "server.errors",
    "AsyncEngineArgs": "server.options.server_options",
    "AsyncLLM": "server.offline.async_llm",
    "AsyncLLMEngine": "server.offline.async_llm",
    "BadRequest": "server.errors",
    "BeamSearchParams": "server.requests.beam_search",
    "EngineArgs": "server.options.server_options",
    "LLMEngine": "server.offline.llm_engine",
    "ModelRegistry": "models.registry",
    "PoolerConfig": "models.pooling.config",
    "PoolingParams": "server.requests.pooling",
    "RequestOutputKind": "server.requests.sampling",
    "SamplingParams": "server.requests.sampling",
    "StructuredOutputsParams": "server.grammars.form_grammar",
    "TextPrompt": "server.offline.prompt_forms",
    "TokensPrompt": "server.offline.prompt_forms",
    "Unavailable": "server.errors",
    "register_model": "models.plugins",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"facet has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES.get(name, "server.offline.request_outputs")), name)


def __dir__() -> list[str]:
    return __all__


if __name__ == "__main__":
    from server.main import main

    main()
