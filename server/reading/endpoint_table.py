"""The table of endpoints that read texts or ask the model: for each its paths, what it needs of the client's
key and of the model, how its body becomes what the engine gets, and whether its answer streams.

Who finds endpoints, checks heads, rights and lengths, or chooses a model reads it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from server.media.audio.audio_decoding import NotInstalled
from server.model_facts import (
    GENERATE,
    OUTPUTS,
    POOLING,
    TRANSCRIPTION,
    Facts,
    Right,
    no_scores,
    no_task,
    require_task,
)
from server.options.server_flags import Dialect
from server.reading import body_table as bodies
from server.reading.body_table import Reading


@dataclass(frozen=True, slots=True)
class Use:
    """The use that an endpoint makes of the model."""

    rights: tuple[Right, ...]
    """The rights of which a client's key must have one."""
    require: Callable[[Facts], None]
    """Raises the error that refuses every request, if the model is not made for this."""


def _task(task: Right) -> Use:
    return Use((task,), lambda facts: require_task(task, facts.tasks))


def _require_vectors(facts: Facts) -> None:
    if not any(task in facts.tasks for task in OUTPUTS.values()):
        raise no_task("embed", facts.tasks)


def _require_classes(facts: Facts) -> None:
    if facts.ready.worker.cosine_scores is None:  # or it classifies by labels that a request names
        require_task("classify", facts.tasks)


def _require_pooling(facts: Facts) -> None:
    if not any(task in POOLING for task in facts.tasks):
        raise no_task("pooling", facts.tasks)


def _require_scores(facts: Facts) -> None:
    if facts.score_type is None:
        raise no_scores(facts.tasks, facts.pooling.num_labels)


def _require_transcription(facts: Facts) -> None:
    require_task(TRANSCRIPTION, facts.tasks)
    if find_spec("av") is None:
        raise NotInstalled


GENERATES, EMBEDS, EMBEDS_TOKENS = _task(GENERATE), _task("embed"), _task("token_embed")
WEIGHS_TOKENS, FINDS_ENTITIES = _task("sparse_embed"), _task("ner")
MAKES_VECTORS = Use(("embed", "sparse_embed", "token_embed"), _require_vectors)
"""Vectors of which the body names the kinds; the right to each is checked where they are known."""
CLASSIFIES = Use(("classify",), _require_classes)
MODERATES = Use(("classify",), lambda facts: None)
"""Its route refuses models whose labels nobody has explained."""
POOLS = Use(("embed", "classify", "token_embed", "token_classify", "sparse_embed"), _require_pooling)
COMPARES = Use(("score",), _require_scores)
TRANSCRIBES = Use((GENERATE,), _require_transcription)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint:
    """A row of the table."""

    paths: tuple[str, ...]
    use: Use | None = None
    """None: it needs no right, and no engine is asked."""
    reading: Reading[Any] | None = None
    """How its body is read; None if the route reads it by itself."""
    dialects: Mapping[Dialect, Reading[Any]] = field(default_factory=dict)
    """The bodies of other APIs at the same paths, of which X-Facet-Dialect or --dialect names one."""
    needs_json: bool = True
    """Whether the request must say that its body is JSON, which foreign web pages cannot say of forms."""
    streams: bool = False
    """Whether the body may ask for a stream."""
    continues: bool = False
    """Whether the body may name an earlier response to continue."""
    is_form: bool = False
    """Whether the body is a form with a file, which goes to the disk as it comes."""


def _row(*paths: str, **facts: Any) -> ModelEndpoint:
    return ModelEndpoint(paths=paths, **facts)


TABLE = (
    _row("/v1/completions", use=GENERATES, reading=bodies.COMPLETION, streams=True),
    _row(*("/completion", "/completions"), use=GENERATES, reading=bodies.LLAMA_COMPLETION, streams=True),
    _row("/infill", use=GENERATES, reading=bodies.LLAMA_INFILL, streams=True),
    _row("/generate", use=GENERATES, reading=bodies.SGLANG_GENERATE, streams=True),
    _row(*("/v1/chat/completions", "/chat/completions"), use=GENERATES, reading=bodies.CHAT, streams=True),
    _row("/v1/chat/completions/batch", use=GENERATES, reading=bodies.BATCH_CHAT),
    _row("/v1/responses", use=GENERATES, reading=bodies.RESPONSES, streams=True, continues=True),
    _row("/v1/responses/input_tokens", reading=bodies.INPUT_TOKENS, continues=True),
    _row("/v1/decisions", use=GENERATES, reading=bodies.DECISIONS),
    _row("/v1/systemone", use=GENERATES, reading=bodies.SYSTEM_ONE),
    _row("/v1/messages", use=GENERATES, reading=bodies.MESSAGES, streams=True),
    _row("/v2/chat", "/cohere/v2/chat", use=GENERATES, reading=bodies.COHERE_CHAT, streams=True),
    _row("/v1/messages/count_tokens", reading=bodies.COUNT_TOKENS),
    _row(
        "/tokenize",
        reading=bodies.TOKENIZE,
        dialects={"tei": bodies.TEI_TOKENIZE, "llama.cpp": bodies.LLAMA_TOKENIZE},
    ),
    _row("/detokenize", reading=bodies.DETOKENIZE, dialects={"llama.cpp": bodies.LLAMA_DETOKENIZE}),
    _row("/decode", reading=bodies.DECODE),
    _row("/apply-template", reading=bodies.TEMPLATE),
    _row("/embedding", use=EMBEDS, reading=bodies.LLAMA_EMBED),
    _row(
        *("/v1/embeddings", "/embeddings"),
        use=MAKES_VECTORS,
        reading=bodies.EMBEDDINGS,
        dialects={"voyage": bodies.VOYAGE_EMBEDDINGS},
    ),
    _row("/embeddings_image", use=EMBEDS, reading=bodies.PICTURES),
    _row("/pooling", use=POOLS, reading=bodies.POOLING),
    _row(
        "/classify",
        use=CLASSIFIES,
        reading=bodies.CLASSIFY,
        dialects={"infinity": bodies.INFINITY_CLASSIFY},
    ),
    _row("/v1/moderations", use=MODERATES, reading=bodies.MODERATIONS),
    _row("/v2/embed", "/cohere/v2/embed", use=MAKES_VECTORS, reading=bodies.COHERE),
    _row("/embed", use=EMBEDS, reading=bodies.EMBED),
    _row("/embed_all", use=EMBEDS_TOKENS, reading=bodies.EMBED_ALL),
    _row("/embed_sparse", use=WEIGHS_TOKENS, reading=bodies.EMBED_SPARSE),
    _row("/predict", use=CLASSIFIES, reading=bodies.PREDICT),
    _row("/similarity", use=EMBEDS, reading=bodies.SIMILARITY),
    _row("/ner", use=FINDS_ENTITIES, reading=bodies.NER),
    _row("/score", "/v1/score", use=COMPARES, reading=bodies.SCORE),
    _row(
        *("/rerank", "/v1/rerank", "/reranking", "/v1/reranking"),
        use=COMPARES,
        reading=bodies.RERANK,
        dialects={
            "tei": bodies.TEI_RERANK,
            "voyage": bodies.VOYAGE_RERANK,
            "infinity": bodies.INFINITY_RERANK,
        },
    ),
    _row("/v2/rerank", "/cohere/v2/rerank", use=COMPARES, reading=bodies.RERANK),
    _row(
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
        use=TRANSCRIBES,
        needs_json=False,
        streams=True,
        is_form=True,
    ),
    # Ollama reads bodies of any type, and its documentation sends them as curl does. What foreign web pages
    # send is refused by its origin.
    _row("/api/chat", use=GENERATES, reading=bodies.OLLAMA_CHAT, needs_json=False, streams=True),
    _row("/api/generate", use=GENERATES, reading=bodies.OLLAMA_GENERATE, needs_json=False, streams=True),
    _row("/api/embed", use=EMBEDS, reading=bodies.OLLAMA_EMBED, needs_json=False),
    _row("/api/embeddings", use=EMBEDS, reading=bodies.OLLAMA_EMBEDDINGS, needs_json=False),
    _row("/api/rerank", use=COMPARES, reading=bodies.OLLAMA_RERANK, needs_json=False),
)

BY_PATH: dict[str, ModelEndpoint] = {path: row for row in TABLE for path in row.paths}
