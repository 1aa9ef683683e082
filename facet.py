"""The public names, such as `from facet import LLM, SamplingParams`; `__all__` below lists them.

They are imported when they are first asked for, so that naming one does not load the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.plugins import register_model, register_model_loader
    from models.pooling.config import PoolerConfig
    from models.registry import ModelRegistry
    from server.answers.dialects import Dialect, ThinkingMarkers
    from server.answers.formats.json_calls import JsonObject, NamedJson
    from server.answers.formats.tagged import Tagged
    from server.answers.parser_plugins import register_reasoning_parser, register_tool_parser
    from server.errors import ApiError, BadRequest, Unavailable
    from server.grammars.form_grammar import StructuredOutputsParams
    from server.offline.async_llm import AsyncLLM, AsyncLLMEngine
    from server.offline.llm import LLM
    from server.offline.llm_engine import LLMEngine
    from server.offline.lora_requests import LoRARequest
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
    from server.offline.stat_loggers import StatLoggerBase
    from server.options.server_options import AsyncEngineArgs, EngineArgs
    from server.requests.beam_search import BeamSearchParams
    from server.requests.pooling import PoolingParams
    from server.requests.sampling import RequestOutputKind, SamplingParams
    from worker.features.processors.custom_processors import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = [
    "LLM",
    "ApiError",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BadRequest",
    "BatchUpdate",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Dialect",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "JsonObject",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "ModelRegistry",
    "MoveDirectionality",
    "NamedJson",
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
    "StatLoggerBase",
    "StructuredOutputsParams",
    "Tagged",
    "TextPrompt",
    "ThinkingMarkers",
    "TokensPrompt",
    "Unavailable",
    "register_model",
    "register_model_loader",
    "register_reasoning_parser",
    "register_tool_parser",
]

_HOMES = {
    "LLM": "server.offline.llm",
    "ApiError": "server.errors",
    "AsyncEngineArgs": "server.options.server_options",
    "AsyncLLM": "server.offline.async_llm",
    "AsyncLLMEngine": "server.offline.async_llm",
    "BadRequest": "server.errors",
    "BatchUpdate": "worker.features.processors.custom_processors",
    "BeamSearchParams": "server.requests.beam_search",
    "Dialect": "server.answers.dialects",
    "EngineArgs": "server.options.server_options",
    "JsonObject": "server.answers.formats.json_calls",
    "LLMEngine": "server.offline.llm_engine",
    "LoRARequest": "server.offline.lora_requests",
    "LogitsProcessor": "worker.features.processors.custom_processors",
    "MoveDirectionality": "worker.features.processors.custom_processors",
    "NamedJson": "server.answers.formats.json_calls",
    "ModelRegistry": "models.registry",
    "PoolerConfig": "models.pooling.config",
    "PoolingParams": "server.requests.pooling",
    "RequestOutputKind": "server.requests.sampling",
    "SamplingParams": "server.requests.sampling",
    "StatLoggerBase": "server.offline.stat_loggers",
    "StructuredOutputsParams": "server.grammars.form_grammar",
    "Tagged": "server.answers.formats.tagged",
    "TextPrompt": "server.offline.prompt_forms",
    "ThinkingMarkers": "server.answers.dialects",
    "TokensPrompt": "server.offline.prompt_forms",
    "Unavailable": "server.errors",
    "register_model": "models.plugins",
    "register_model_loader": "models.plugins",
    "register_reasoning_parser": "server.answers.parser_plugins",
    "register_tool_parser": "server.answers.parser_plugins",
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
