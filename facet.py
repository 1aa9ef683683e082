"""The public names, such as `from facet import LLM, SamplingParams`; `__all__` below lists them.

They are imported when they are first asked for, so that naming one does not load the others.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.plugins import register_model, register_model_loader
    from models.pooling.config import PoolerConfig
    from models.registry import ModelRegistry
    from server.errors import ApiError, BadRequest, Unavailable
    from server.grammars.response_format import StructuredOutputsParams
    from server.metrics.metric_reader import Counter, Gauge, Histogram, Metric, Vector
    from server.metrics.stat_loggers import StatLoggerBase
    from server.offline.async_llm import AsyncLLM, AsyncLLMEngine
    from server.offline.llm import LLM
    from server.offline.llm_engine import LLMEngine
    from server.offline.prompt_forms import LoRARequest, TextPrompt, TokensPrompt
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
    from server.options.parse_server_options import AsyncEngineArgs, EngineArgs
    from server.options.server_flags import VllmConfig
    from server.output_parsing.dialect import Dialect, ThinkingMarkers
    from server.output_parsing.formats.json_calls import JsonObject, NamedJson
    from server.output_parsing.formats.tagged import Tagged
    from server.output_parsing.parser_plugins import register_reasoning_parser, register_tool_parser
    from server.requests.beam_search import BeamSearchParams
    from server.requests.pooling import PoolingParams
    from server.requests.repetition import RepetitionDetectionParams
    from server.requests.sampling_params import RequestOutputKind, SamplingParams
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
    "Counter",
    "Dialect",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "Gauge",
    "Histogram",
    "JsonObject",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "Metric",
    "ModelRegistry",
    "MoveDirectionality",
    "NamedJson",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
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
    "Vector",
    "VllmConfig",
    "register_model",
    "register_model_loader",
    "register_reasoning_parser",
    "register_tool_parser",
]

_HOMES = {
    "models.plugins": "register_model register_model_loader",
    "models.pooling.config": "PoolerConfig",
    "models.registry": "ModelRegistry",
    "server.output_parsing.tool_call_dialects": "Dialect ThinkingMarkers",
    "server.output_parsing.formats.json_calls": "JsonObject NamedJson",
    "server.output_parsing.formats.tagged": "Tagged",
    "server.output_parsing.parser_plugins": "register_reasoning_parser register_tool_parser",
    "server.errors": "ApiError BadRequest Unavailable",
    "server.grammars.response_format": "StructuredOutputsParams",
    "server.metrics.metric_reader": "Counter Gauge Histogram Metric Vector",
    "server.metrics.stat_loggers": "StatLoggerBase",
    "server.offline.async_llm": "AsyncLLM AsyncLLMEngine",
    "server.offline.llm": "LLM",
    "server.offline.llm_engine": "LLMEngine",
    "server.offline.prompt_forms": "LoRARequest TextPrompt TokensPrompt",
    "server.options.parse_server_options": "AsyncEngineArgs EngineArgs",
    "server.options.server_flags": "VllmConfig",
    "server.requests.beam_search": "BeamSearchParams",
    "server.requests.pooling": "PoolingParams",
    "server.requests.repetition": "RepetitionDetectionParams",
    "server.requests.sampling_params": "RequestOutputKind SamplingParams",
    "worker.features.processors.custom_processors": "BatchUpdate LogitsProcessor MoveDirectionality",
}
"""The names of each module; all others are those of `server.offline.request_outputs`."""


_PACKAGES = "models", "worker", "engine_core", "server"


def _import_packages() -> None:
    """Imports Facet's packages, of which a program's own folder may have modules of the same names."""
    own = Path(__file__).parent
    sys.path.insert(0, str(own))
    try:
        for name in _PACKAGES:
            where = import_module(name).__file__
            if where is None or Path(where).parent != own / name:
                raise ImportError(
                    f"{where or name} was imported before facet, and has the name of one of its packages, "
                    f"{own / name}: give it another name."
                )
    finally:
        sys.path.remove(str(own))


def _warn_of_hidden(folder: Path) -> None:
    """Warns of modules of a program's own folder that it would not get: Facet's packages have their names."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    for name in _PACKAGES:
        for hidden in (folder / f"{name}.py", folder / name / "__init__.py"):
            if hidden.is_file() and folder != Path(__file__).parent and str(hidden) != program:
                message = f"{hidden} is hidden by facet's package of the same name: give it another name."
                warnings.warn(message, stacklevel=3)


_import_packages()
_warn_of_hidden(Path(sys.path[0] if sys.path else "").absolute())


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("facet-serve")
    if name not in __all__:
        raise AttributeError(f"facet has no {name!r}; it has {', '.join(__all__)}")
    from worker.host.garbage import without_looking_for_garbage

    homes = (module for module, names in _HOMES.items() if name in names.split())
    with without_looking_for_garbage():
        return getattr(import_module(next(homes, "server.offline.request_outputs")), name)


def __dir__() -> list[str]:
    return __all__


if __name__ == "__main__":
    from server.main import main

    main()
