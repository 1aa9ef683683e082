"""Turns the texts of a body that are to be compared into the items that the engine pools."""

from __future__ import annotations

import msgspec

from server.api.scores import RerankRequest, ScoreRequest
from server.api.tei import TextsRequest
from server.errors import too_many
from server.reading.reader import Reader
from server.requests.scoring import Compared, Pairs, ScoreOptions, read_pairs


class RankedTexts(msgspec.Struct, frozen=True, gc=False):
    compared: Compared
    texts: list[bytes] = []
    """The documents as JSON, if the answer shall repeat them."""


def read_score(body: ScoreRequest, reader: Reader) -> Compared:
    terms = body.terms(reader.facts)
    return _read(body.pairs(), body.options(terms, body.names), reader)


def read_rerank(body: RerankRequest | TextsRequest, reader: Reader) -> RankedTexts:
    terms = body.terms(reader.facts)
    if isinstance(body, TextsRequest):
        options, repeats = body.options(terms), body.return_text
    else:
        options, repeats = body.options(terms, ("query", "documents")), body.return_documents is not False
    pairs = body.pairs()
    compared = _read(pairs, options, reader)
    return RankedTexts(compared, [msgspec.json.encode(text) for text in pairs.documents] if repeats else [])


def work_of_score(body: ScoreRequest, reader: Reader) -> int:
    return _work(body.pairs(), body.instruction, reader)


def work_of_rerank(body: RerankRequest | TextsRequest, reader: Reader) -> int:
    instruction = None if isinstance(body, TextsRequest) else body.instruction
    return _work(body.pairs(), instruction, reader)


def _work(pairs: Pairs, instruction: str | None, reader: Reader) -> int:
    """The characters that are written beside each document: the query, an instruction, and a template."""
    beside = sum(map(len, pairs.queries)) // max(1, len(pairs.queries)) + len(instruction or "")
    if reader.facts.score_template is not None:
        beside += max(len(reader.facts.score_template), reader.tokenizer.chat.overhead)
    return len(pairs.documents) * beside


def _read(pairs: Pairs, options: ScoreOptions, reader: Reader) -> Compared:
    most = reader.facts.limits.inputs
    if len(pairs.documents) > most:
        raise too_many(options.names[1], most, "texts", len(pairs.documents))
    return read_pairs(pairs, options, reader.facts, reader.tokenizer)
