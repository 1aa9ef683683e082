"""Turns the texts of a body, and pairs of texts to be compared, into the items that the engine pools."""

from __future__ import annotations

from typing import Protocol

import msgspec

from server.api.cohere import CohereRequest
from server.api.pooling_bodies import TextBody
from server.api.scores import RerankRequest, ScoreRequest
from server.api.shared_fields import RequestTerms
from server.api.tei import PredictRequest, TextsRequest
from server.errors import too_many
from server.model_facts import Facts
from server.reading.context import ReadingContext
from server.reading.prompts import work_of_template, write_conversation
from server.requests.pooling import Item, PoolingParams, Source, TextReader, Truncation
from server.requests.scoring import Compared, read_pairs, texts_and_pairs
from worker.protocol import Task

ComparingRequest = ScoreRequest | RerankRequest | TextsRequest


class PoolingRequestBody(Protocol):
    """A body with texts that are pooled."""

    @property
    def terms(self) -> RequestTerms: ...

    def truncation(self, facts: Facts) -> Truncation: ...


class TextsBody(PoolingRequestBody, Protocol):
    """A body with texts, each of which is pooled by itself."""

    texts_field: str
    """The field that has them."""

    @property
    def sources(self) -> list[Source]: ...

    def params(self) -> PoolingParams: ...

    def prompt(self, task: Task, facts: Facts) -> str:
        """The instruction that is written before each text."""
        ...


class ReadTexts(msgspec.Struct, frozen=True, gc=False):
    """What has been read of the texts of a body."""

    items: list[Item]
    repeated: list[bytes] = []
    """The texts as JSON, if the answer repeats them."""
    many: bool = True
    """Whether the texts came in a list, as the answer then does."""


def read_texts(body: TextsBody, context: ReadingContext) -> ReadTexts:
    facts = context.facts
    params = body.params().resolve(facts)
    sources, name, prompt, special = body.sources, body.texts_field, body.prompt(params.task, facts), True
    if isinstance(body, TextBody):
        special = body.add_special_tokens is not False
        if conversations := body.conversations():
            _check_count(len(conversations), name, facts)
            sources = [write_conversation(body, messages, context) for messages in conversations]
            name, prompt, special = "messages", "", bool(body.add_special_tokens)
    _check_count(len(sources), name, facts)
    texts = TextReader(facts, context.tokenizer, body.truncation(facts), prompt, special, name)
    repeated = [msgspec.json.encode(text) for text in sources] if isinstance(body, CohereRequest) else []
    return ReadTexts(texts.read_all(sources, params), repeated)


def read_predict(body: PredictRequest, context: ReadingContext) -> ReadTexts:
    facts = context.facts
    many = isinstance(body.inputs, list)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    _check_count(len(inputs), "inputs", facts)
    params = body.params().resolve(facts)
    return ReadTexts(
        texts_and_pairs(inputs, body.truncation(facts), params, facts, context.tokenizer), many=many
    )


def read_compared(body: ComparingRequest, context: ReadingContext) -> Compared:
    pairs, options = body.pairs(), body.options(context.facts)
    _check_count(len(pairs.documents), options.names[1], context.facts)
    compared = read_pairs(pairs, options, context.facts, context.tokenizer)
    if not body.repeats_documents:
        return compared
    return msgspec.structs.replace(compared, repeated=list(map(msgspec.json.encode, pairs.documents)))


def work_of_texts(body: TextsBody, context: ReadingContext) -> int:
    """The characters that a template or an instruction adds to the texts."""
    if isinstance(body, TextBody) and (conversations := body.conversations()):
        return work_of_template(body, context) + len(conversations) * context.tokenizer.chat.overhead
    longest_prompt = max(map(len, context.facts.pooling.texts.prompts.values()), default=0)
    return len(body.sources) * longest_prompt


def work_of_compared(body: ComparingRequest, context: ReadingContext) -> int:
    """The characters that are written beside each document: the query, an instruction, and a template."""
    pairs, instruction = body.pairs(), body.options(context.facts).instruction
    beside = sum(map(len, pairs.queries)) // max(1, len(pairs.queries)) + len(instruction or "")
    if context.facts.score_template is not None:
        beside += max(len(context.facts.score_template), context.tokenizer.chat.overhead)
    return len(pairs.documents) * beside


def _check_count(number: int, name: str, facts: Facts) -> None:
    if number > facts.limits.inputs:
        raise too_many(name, facts.limits.inputs, "texts", number)
