"""Turns the texts of a body, and pairs of texts to be compared, into the items that the engine pools."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from server.api.cohere import CohereRequest
from server.api.pooling_bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    PromptedBody,
    TextBody,
)
from server.api.scores import RerankRequest, ScoreRequest
from server.api.tei import EmbedAllRequest, EmbedRequest, PredictRequest, SimilarityRequest, TextsRequest
from server.errors import too_many
from server.model_facts import Facts
from server.reading.prompts import work_of_template, write_conversation
from server.reading.reader import Reader
from server.requests.pooling import (
    Item,
    PoolingParams,
    Source,
    TextReader,
    Truncation,
    find_prompt,
    prompt_for,
)
from server.requests.scoring import Compared, Pairs, ScoreOptions, read_pairs, texts_and_pairs
from worker.protocol import Task


class EmbeddedTexts(msgspec.Struct, frozen=True, gc=False):
    """The items of texts that the answer repeats."""

    items: list[Item]
    texts: list[bytes]
    """The texts as JSON."""


class PredictedTexts(msgspec.Struct, frozen=True, gc=False):
    items: list[Item]
    many: bool
    """Whether the texts came in a list, as the answer then does."""


def read_embeddings(body: EmbeddingRequest, reader: Reader) -> list[Item]:
    return _read_body(body, body.params(), _prompt_of(body, "embed", reader.facts), reader)


def read_pooling(body: PoolingRequest, reader: Reader) -> list[Item]:
    params = body.params()
    task = params.resolve(reader.facts).task
    return _read_body(body, params, _prompt_of(body, task, reader.facts), reader)


def read_classify(body: ClassifyRequest, reader: Reader) -> list[Item]:
    return _read_body(body, body.params(), "", reader)


def read_cohere(body: CohereRequest, reader: Reader) -> EmbeddedTexts:
    facts, texts = reader.facts, body.all_texts
    prompt = prompt_for(body.input_type, facts) if body.input_type else find_prompt(None, facts)
    params = PoolingParams(task="embed", dimensions=body.output_dimension)
    items = _read(texts, params, reader, body.terms(facts).truncation, prompt, name="texts")
    return EmbeddedTexts(items, [msgspec.json.encode(text) for text in texts])


def read_embed(body: EmbedRequest, reader: Reader) -> list[Item]:
    return _read_inputs(body, body.params("embed"), reader)


def read_embed_all(body: EmbedAllRequest, reader: Reader) -> list[Item]:
    return _read_inputs(body, PoolingParams(task="token_embed"), reader)


def read_predict(body: PredictRequest, reader: Reader) -> PredictedTexts:
    facts = reader.facts
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    params = PoolingParams(task="classify", use_activation=False if body.raw_scores else None)
    _check_count(len(inputs), "inputs", facts)
    truncation = body.terms(facts).truncation
    items = texts_and_pairs(inputs, truncation, params.resolve(facts), facts, reader.tokenizer)
    return PredictedTexts(items, many=isinstance(body.inputs, list))


def read_similarity(body: SimilarityRequest, reader: Reader) -> list[Item]:
    """The source sentence comes first."""
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    prompt = find_prompt(body.parameters.prompt_name, reader.facts)
    truncation = body.parameters.terms(reader.facts).truncation
    return _read(texts, PoolingParams(task="embed"), reader, truncation, prompt, name="sentences")


def work_of_texts(body: TextBody, reader: Reader) -> int:
    """The characters that a template or an instruction adds to the texts."""
    conversations = body.conversations()
    if conversations:
        return work_of_template(body, reader) + len(conversations) * reader.tokenizer.chat.overhead
    return len(body.input or []) * _longest_prompt(reader.facts)


def work_of_cohere(body: CohereRequest, reader: Reader) -> int:
    return len(body.texts or body.inputs or []) * _longest_prompt(reader.facts)


def work_of_inputs(body: EmbedRequest | EmbedAllRequest, reader: Reader) -> int:
    return len(body.inputs or []) * _longest_prompt(reader.facts)


def work_of_similarity(body: SimilarityRequest, reader: Reader) -> int:
    return len(body.inputs.sentences) * _longest_prompt(reader.facts)


def _longest_prompt(facts: Facts) -> int:
    return max(map(len, facts.pooling.texts.prompts.values()), default=0)


def _read_inputs(body: EmbedRequest | EmbedAllRequest, params: PoolingParams, reader: Reader) -> list[Item]:
    prompt = find_prompt(body.prompt_name, reader.facts)
    truncation = body.terms(reader.facts).truncation
    return _read(body.inputs or [], params, reader, truncation, prompt, name="inputs")


def _read_body(body: TextBody, params: PoolingParams, prompt: str, reader: Reader) -> list[Item]:
    conversations = body.conversations()
    _check_count(len(body.input or conversations), "input", reader.facts)
    truncation = body.terms(reader.facts).truncation
    if not conversations:
        special = body.add_special_tokens is not False
        return _read(body.input or [], params, reader, truncation, prompt, special)
    written = [write_conversation(body, messages, reader) for messages in conversations]
    special = bool(body.add_special_tokens)
    return _read(written, params, reader, truncation, "", special, name="messages")


def _read(
    sources: Sequence[Source],
    params: PoolingParams,
    reader: Reader,
    truncation: Truncation,
    prompt: str = "",
    add_special_tokens: bool = True,
    name: str = "input",
) -> list[Item]:
    _check_count(len(sources), name, reader.facts)
    texts = TextReader(reader.facts, reader.tokenizer, truncation, prompt, add_special_tokens, name)
    return texts.read_all(sources, params.resolve(reader.facts))


def _prompt_of(body: PromptedBody, task: Task, facts: Facts) -> str:
    if body.input_type is not None:
        return prompt_for(body.input_type, facts)
    return find_prompt(body.prompt_name, facts, task)


def _check_count(number: int, name: str, facts: Facts) -> None:
    if number > facts.limits.inputs:
        raise too_many(name, facts.limits.inputs, "texts", number)


class RankedTexts(msgspec.Struct, frozen=True, gc=False):
    compared: Compared
    texts: list[bytes] = []
    """The documents as JSON, if the answer shall repeat them."""


def read_score(body: ScoreRequest, reader: Reader) -> Compared:
    terms = body.terms(reader.facts)
    return _read_compared(body.pairs(), body.options(terms, body.names), reader)


def read_rerank(body: RerankRequest | TextsRequest, reader: Reader) -> RankedTexts:
    terms = body.terms(reader.facts)
    if isinstance(body, TextsRequest):
        options, repeats = body.options(terms), body.return_text
    else:
        options, repeats = body.options(terms, ("query", "documents")), body.return_documents is not False
    pairs = body.pairs()
    compared = _read_compared(pairs, options, reader)
    return RankedTexts(compared, [msgspec.json.encode(text) for text in pairs.documents] if repeats else [])


def work_of_score(body: ScoreRequest, reader: Reader) -> int:
    return _work_of_pairs(body.pairs(), body.instruction, reader)


def work_of_rerank(body: RerankRequest | TextsRequest, reader: Reader) -> int:
    instruction = None if isinstance(body, TextsRequest) else body.instruction
    return _work_of_pairs(body.pairs(), instruction, reader)


def _work_of_pairs(pairs: Pairs, instruction: str | None, reader: Reader) -> int:
    """The characters that are written beside each document: the query, an instruction, and a template."""
    beside = sum(map(len, pairs.queries)) // max(1, len(pairs.queries)) + len(instruction or "")
    if reader.facts.score_template is not None:
        beside += max(len(reader.facts.score_template), reader.tokenizer.chat.overhead)
    return len(pairs.documents) * beside


def _read_compared(pairs: Pairs, options: ScoreOptions, reader: Reader) -> Compared:
    most = reader.facts.limits.inputs
    if len(pairs.documents) > most:
        raise too_many(options.names[1], most, "texts", len(pairs.documents))
    return read_pairs(pairs, options, reader.facts, reader.tokenizer)
