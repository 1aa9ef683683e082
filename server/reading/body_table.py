"""The table of bodies: for each endpoint its type, its longest length, and the reader of its texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from server.errors import BadRequest, too_many
from server.model_facts import Facts
from server.reading import other_apis, prompts, tokenizing
from server.reading.decisions import ReadDecisions, read_decisions, work_of_decisions
from server.reading.pooled_conversations import adds_special, read_conversations, read_media_pairs
from server.reading.prompts import Conversation, Prompt, work_of_template
from server.reading.reading_context import ReadingContext
from server.requests.labels.entities import read_entity_texts
from server.requests.pooling import PoolingParams, ReadTexts, Source, TextReader, Truncation
from server.requests.scoring import Compared, read_pairs, texts_and_pairs
from server.requests.text_windows import read_in_windows
from server.schemas.chat import BatchChatRequest, ChatRequest
from server.schemas.cohere_embed import CohereRequest
from server.schemas.completions import CompletionRequest
from server.schemas.conversations.anthropic import CountTokensRequest, MessagesRequest
from server.schemas.conversations.cohere_chat import CohereChatRequest
from server.schemas.conversations.responses import ResponsesRequest
from server.schemas.decisions.openai_decisions import DecisionRequest
from server.schemas.decisions.system_one import SystemOneRequest
from server.schemas.messages import Message
from server.schemas.moderations import ModerationRequest
from server.schemas.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRerankRequest,
)
from server.schemas.pooling_bodies import (
    EmbeddingRequest,
    PicturesRequest,
    PoolingRequest,
    TextBody,
)
from server.schemas.sampling_fields import RequestTerms
from server.schemas.score_and_rerank import ClassifyRequest, EntitiesRequest, RerankRequest, ScoreRequest
from server.schemas.tei import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    SimilarityRequest,
    TeiTokenize,
    TextsRequest,
)
from server.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from server.schemas.vendor_bodies.infinity import InfinityClassify, InfinityRerank
from server.schemas.vendor_bodies.llama_cpp import (
    LlamaCompletion,
    LlamaEmbedRequest,
    LlamaInfill,
    LlamaTokenize,
)
from server.schemas.vendor_bodies.sglang import GenerateRequest
from server.schemas.vendor_bodies.voyage import VoyageEmbeddingRequest, VoyageRerank
from worker.protocol import Pooling, Task

ComparingRequest = ScoreRequest | RerankRequest | TextsRequest


class PoolingRequestBody(Protocol):
    """A body with texts that are pooled."""

    @property
    def terms(self) -> RequestTerms: ...

    def truncation(self, facts: Facts) -> Truncation: ...


class TextsBody(PoolingRequestBody, Protocol):
    """A body with texts, each of which is pooled by itself."""

    texts_field: ClassVar[str]

    @property
    def sources(self) -> list[Source]: ...

    def params(self) -> PoolingParams: ...

    def prompt(self, task: Task, facts: Facts) -> str:
        """The instruction that is written before each text."""
        ...


def read_texts(body: TextsBody, context: ReadingContext) -> ReadTexts:
    facts = context.facts
    if isinstance(body, ClassifyRequest):
        _check_labels(body, facts)
    params = body.params().resolve(facts)
    if isinstance(body, TextBody | CohereRequest) and (conversations := body.conversations()):
        return _read_conversations(conversations, body, params, context)
    sources, name, prompt = body.sources, body.texts_field, body.prompt(params.task, facts)
    special = not isinstance(body, TextBody) or body.add_special_tokens is not False
    _check_count(len(sources), name, facts)
    in_windows = params.task == "embed" and not params.outputs
    texts = TextReader(
        facts, context.tokenizer, body.truncation(facts), prompt, special, name, in_windows=in_windows
    )
    repeated = [msgspec.json.encode(text) for text in sources] if isinstance(body, CohereRequest) else []
    items = texts.read_all(sources, params)
    if facts.pooling.max_embed_len is not None:
        items = read_in_windows(items, facts)
    return ReadTexts(items, repeated)


def _check_labels(body: ClassifyRequest, facts: Facts) -> None:
    """Refuses a request that names labels, where the model has some of its own, or the other way round."""
    compares = facts.ready.worker.cosine_scores is not None
    if compares and body.labels is None:
        raise BadRequest(
            "This model compares: give `labels`, whole texts that each input is compared with.", "labels"
        )
    if body.labels and not compares:
        own = ", ".join(facts.pooling.labels[:8]) or "without names"
        raise BadRequest(
            "`labels` are for models that compare pictures with texts, such as CLIP; this one has labels of "
            f"its own: {own}.",
            "labels",
        )


def _read_conversations(
    conversations: list[list[Message]],
    body: TextBody | CohereRequest,
    params: Pooling,
    context: ReadingContext,
) -> ReadTexts:
    facts, options = context.facts, body if isinstance(body, TextBody) else body.template_options
    _check_count(len(conversations), body.texts_field, facts)
    special = options.add_special_tokens
    special = adds_special(context) if special is None else special
    truncation, prompt = body.truncation(facts), body.prompt(params.task, facts)
    reader = TextReader(facts, context.tokenizer, truncation, prompt, special, "messages")
    return ReadTexts(read_conversations(conversations, options, context, reader, params))


def read_predict(body: PredictRequest, context: ReadingContext) -> ReadTexts:
    facts = context.facts
    many = isinstance(body.inputs, list)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    _check_count(len(inputs), "inputs", facts)
    return ReadTexts(texts_and_pairs(inputs, body.options(facts), facts, context.tokenizer), many=many)


def read_entities(body: EntitiesRequest, context: ReadingContext) -> ReadTexts:
    facts, texts = context.facts, body.input
    _check_count(len(texts), "input", facts)
    items, spans = read_entity_texts(texts, body.labels, facts, context.tokenizer, cut=body.truncate)
    return ReadTexts(items, [msgspec.json.encode(text) for text in texts], spans=spans)


def work_of_entities(body: EntitiesRequest, context: ReadingContext) -> int:
    """The characters of labels, which stand before each text."""
    return len(body.input) * sum(map(len, body.labels))


def read_compared(body: ComparingRequest, context: ReadingContext) -> Compared:
    pairs, options = body.pairs(), body.options(context.facts)
    _check_count(len(pairs.documents), options.names[1], context.facts)
    if pairs.has_media:
        compared = read_media_pairs(pairs, options, context, body.terms.salt)
    else:
        compared = read_pairs(pairs, options, context.facts, context.tokenizer)
    if not body.repeats_documents:
        return compared
    texts = [side if isinstance(side, str) else None for side in pairs.documents]
    return msgspec.structs.replace(compared, repeated=list(map(msgspec.json.encode, texts)))


def work_of_texts(body: TextsBody, context: ReadingContext) -> int:
    """The characters that a template or an instruction adds to the texts."""
    if isinstance(body, TextBody) and (conversations := body.conversations()):
        return work_of_template(body, context) + len(conversations) * context.tokenizer.chat.overhead
    if context.facts.pooling.texts.chat is not None:
        return len(body.sources) * context.tokenizer.chat.overhead
    prompts = context.facts.pooling.texts.prompts
    return len(body.sources) * max(map(len, prompts.values())) if prompts else 0


def work_of_compared(body: ComparingRequest, context: ReadingContext) -> int:
    """The characters that are written beside each document: the query, an instruction, and a template."""
    pairs, instruction = body.pairs(), body.options(context.facts).instruction
    beside = sum(map(len, pairs.queries)) // max(1, len(pairs.queries)) + len(instruction or "")
    return len(pairs.documents) * (beside + _around_pair(context))


def work_of_predict(body: PredictRequest, context: ReadingContext) -> int:
    return len(body.inputs) * _around_pair(context) if isinstance(body.inputs, list) else 0


def _around_pair(context: ReadingContext) -> int:
    """The characters that a template writes around two texts."""
    template = context.facts.score_template
    return 0 if template is None else max(len(template), context.tokenizer.chat.overhead)


def _check_count(number: int, name: str, facts: Facts) -> None:
    if number > facts.limits.inputs:
        raise too_many(name, facts.limits.inputs, "texts", number)


USUAL_BODY = 4 << 20
"""The longest body in bytes; and of an endpoint for many texts at a time, and of one that reads none:"""
MANY_TEXTS = 16 << 20
OTHER_BODY = 1 << 20

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Reading(Generic[R]):
    """Turns the texts of a body into what the engine gets."""

    name: str
    body: Any
    """The type of the body, as pydantic checks it."""
    read: Callable[[Any, ReadingContext], R]
    result: type[R]
    most_bytes: int = USUAL_BODY
    takes_media: bool = False
    """Whether the body may have media parts, whose files are cut out of it before it is parsed."""
    work: Callable[[Any, ReadingContext], int] | None = None
    """Returns the characters of text that are written and tokenized beside those of the body, if there can be
    many."""


def _conversation(
    name: str,
    body: Any,
    read: Callable[[Any, ReadingContext], R],
    result: type[R],
    work: Callable[[Any, ReadingContext], int] | None = None,
) -> Reading[R]:
    return Reading(name, body, read, result, takes_media=True, work=work)


COMPLETION = Reading("completion", CompletionRequest, prompts.read_completion, list[Prompt])
CHAT = _conversation("chat", ChatRequest, prompts.read_chat, Conversation, prompts.work_of_template)
BATCH_CHAT = _conversation(
    "batch_chat", BatchChatRequest, prompts.read_batch, list[Conversation], prompts.work_of_template
)
RESPONSES = _conversation("responses", ResponsesRequest, other_apis.read_response, Conversation)
MESSAGES = _conversation("messages", MessagesRequest, other_apis.read_messages, Conversation)
COHERE_CHAT = _conversation("cohere_chat", CohereChatRequest, other_apis.read_messages, Conversation)
DECISIONS = _conversation("decisions", DecisionRequest, read_decisions, ReadDecisions, work_of_decisions)
SYSTEM_ONE = Reading("system_one", SystemOneRequest, read_decisions, ReadDecisions, work=work_of_decisions)
COUNT_TOKENS = _conversation("count_tokens", CountTokensRequest, other_apis.count_tokens, int)
INPUT_TOKENS = _conversation("input_tokens", ResponsesRequest, other_apis.count_tokens, int)
OLLAMA_CHAT = _conversation("ollama_chat", OllamaChatRequest, other_apis.read_ollama, Conversation)
OLLAMA_GENERATE = _conversation(
    "ollama_generate", OllamaGenerateRequest, other_apis.read_ollama, Conversation
)
LLAMA_COMPLETION = Reading("llama_completion", LlamaCompletion, prompts.read_completion, list[Prompt])
LLAMA_INFILL = Reading("llama_infill", LlamaInfill, prompts.read_completion, list[Prompt])
SGLANG_GENERATE = Reading("sglang_generate", GenerateRequest, prompts.read_completion, list[Prompt])
TOKENIZE = _conversation(
    "tokenize", TokenizeRequest, tokenizing.read_tokenize, bytes, prompts.work_of_template
)
DETOKENIZE = Reading("detokenize", DetokenizeRequest, tokenizing.read_detokenize, bytes)
LLAMA_TOKENIZE = Reading("llama_tokenize", LlamaTokenize, tokenizing.read_llama_tokenize, bytes)
LLAMA_DETOKENIZE = Reading("llama_detokenize", DetokenizeRequest, tokenizing.read_llama_detokenize, bytes)
TEI_TOKENIZE = Reading("tei_tokenize", TeiTokenize, tokenizing.read_tei_tokenize, bytes)
DECODE = Reading("decode", DecodeRequest, tokenizing.read_decode, bytes)
TEMPLATE = _conversation("template", ChatRequest, tokenizing.read_template, bytes, prompts.work_of_template)


def _pooling(name: str, body: Any, *, takes_media: bool = False) -> Reading[ReadTexts]:
    return Reading(name, body, read_texts, ReadTexts, MANY_TEXTS, takes_media, work_of_texts)


def _comparing(name: str, body: Any) -> Reading[Compared]:
    return Reading(name, body, read_compared, Compared, MANY_TEXTS, True, work_of_compared)


EMBEDDINGS = _pooling("embeddings", EmbeddingRequest, takes_media=True)
VOYAGE_EMBEDDINGS = _pooling("voyage_embeddings", VoyageEmbeddingRequest, takes_media=True)
PICTURES = _pooling("pictures", PicturesRequest, takes_media=True)
POOLING = _pooling("pooling", PoolingRequest, takes_media=True)
CLASSIFY = _pooling("classify", ClassifyRequest, takes_media=True)
INFINITY_CLASSIFY = _pooling("infinity_classify", InfinityClassify, takes_media=True)
MODERATIONS = _pooling("moderations", ModerationRequest)
COHERE = _pooling("cohere", CohereRequest, takes_media=True)
EMBED = _pooling("embed", EmbedRequest)
LLAMA_EMBED = _pooling("llama_embed", LlamaEmbedRequest)
EMBED_ALL = _pooling("embed_all", EmbedAllRequest)
EMBED_SPARSE = _pooling("embed_sparse", EmbedSparseRequest)
OLLAMA_EMBED = _pooling("ollama_embed", OllamaEmbedRequest)
OLLAMA_EMBEDDINGS = _pooling("ollama_embeddings", OllamaEmbeddingsRequest)
SIMILARITY = _pooling("similarity", SimilarityRequest)
PREDICT = Reading("predict", PredictRequest, read_predict, ReadTexts, MANY_TEXTS, work=work_of_predict)
NER = Reading("ner", EntitiesRequest, read_entities, ReadTexts, MANY_TEXTS, work=work_of_entities)
SCORE = _comparing("score", ScoreRequest)
RERANK = _comparing("rerank", RerankRequest)
TEI_RERANK = _comparing("tei_rerank", TextsRequest)
VOYAGE_RERANK = _comparing("voyage_rerank", VoyageRerank)
INFINITY_RERANK = _comparing("infinity_rerank", InfinityRerank)
OLLAMA_RERANK = _comparing("ollama_rerank", OllamaRerankRequest)

BY_NAME = {each.name: each for each in tuple(vars().values()) if isinstance(each, Reading)}
