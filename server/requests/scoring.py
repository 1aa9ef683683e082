"""Compares texts: which items are pooled for it, and how scores are computed from the answers.

A scorer is a generator: it yields items, is sent their answers in order, and returns the scores. So the same
arithmetic runs over the server's engine and over the one of `LLM`, and knows neither.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from server.errors import ApiError, BadRequest, Unavailable
from server.model_facts import Facts, find_outputs, no_scores
from server.requests import pooling
from server.requests.prompt_length import check_text_characters, check_text_tokens
from server.requests.similarity import compare, compare_sparse
from server.requests.vectors import as_array, by_task, scalar
from server.text.tokenizer import Tokenizer, unpack
from worker.protocol import Pooling, Vectors

Scorer = Generator[list[pooling.PooledText], list[Vectors], list[float]]

FEW_VECTORS = 256
"""So many vectors are compared or written in the event loop; more of them in a thread."""

QUERIES_AT_ONCE = 64
"""Queries of late interaction at a time: the worker keeps them until their documents have come, and has
memory for so many."""

Weights = tuple[float, float, float]
"""How much the dense vectors count in a score, the weights of tokens, and the vectors of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    use_activation: bool | None = None
    truncation: pooling.Truncation = pooling.NO_TRUNCATION
    max_tokens_per_query: int = 0
    """The longest query in tokens, and likewise of documents; 0 is no limit."""
    max_tokens_per_doc: int = 0
    instruction: str | None = None
    """A text that says what makes a document a good answer, for models that read it."""
    template_kwargs: dict[str, Any] | None = None
    names: tuple[str, str] = ("query", "document")
    """Names of the request's fields, for errors."""
    weights: Weights | None = None
    dimensions: int | None = None
    """The length to which vectors are cut before they are compared."""


Side = str | list[dict[str, str]]
"""What is compared: a text, or the parts of a content with media."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts to compare: each query with the document at its index, or one query with all documents."""

    queries: Sequence[Side]
    documents: Sequence[Side]

    @property
    def has_media(self) -> bool:
        return not all(isinstance(side, str) for side in (*self.queries, *self.documents))

    def check(self, names: tuple[str, str]) -> None:
        """Raises BadRequest for lists that do not fit. `names` are of the request's fields, for errors."""
        if not self.queries:
            raise BadRequest("At least one text element must be given", names[0])
        if not self.documents:
            raise BadRequest("At least one text_pair element must be given", names[1])
        if len(self.queries) not in (1, len(self.documents)):
            raise BadRequest("Input lengths must be either 1:1, 1:N or N:N", names[1])


class Compared(msgspec.Struct, frozen=True, gc=False):
    """The items of texts to compare."""

    queries: list[pooling.PooledText]
    documents: list[pooling.PooledText]
    """The documents, or each pair of texts if the model reads both as one; then there are no queries."""
    repeated: list[bytes] = []
    """The documents as JSON, if the answer shall repeat them."""
    weights: Weights | None = None
    """Set if all outputs of the model are compared."""

    def query_of(self, document: int) -> pooling.PooledText:
        return self.queries[0 if len(self.queries) == 1 else document]


def read_pairs(pairs: Pairs, options: ScoreOptions, facts: Facts, tokenizer: Tokenizer) -> Compared:
    """Checks the request and tokenizes its texts."""
    check_pairs(pairs, options, facts)
    queries = cut_all(pairs.queries, options.max_tokens_per_query, tokenizer)
    documents = cut_all(pairs.documents, options.max_tokens_per_doc, tokenizer)
    if facts.score_type == "cross-encoder" and options.weights is None:
        one = len(queries) == 1
        texts = [(queries[0 if one else i], document) for i, document in enumerate(documents)]
        return Compared([], _read_together(texts, options, facts, tokenizer))
    items = [
        pooling.TextReader(
            facts, tokenizer, options.truncation, pooling.prompt_for(kind, facts), name=name
        ).read_all(texts, vector_params(facts, options, query=kind == "query"))
        for kind, name, texts in (
            ("query", options.names[0], queries),
            ("document", options.names[1], documents),
        )
    ]
    return Compared(items[0], items[1], weights=options.weights)


def vector_params(facts: Facts, options: ScoreOptions, *, query: bool) -> Pooling:
    """How texts are pooled whose vectors are compared: first those of tokens, which the worker keeps."""
    weights, dimensions = options.weights, options.dimensions
    if weights is not None:
        outputs = [
            name for name, weight in zip(("dense", "sparse", "tokens"), weights, strict=True) if weight
        ]
        find_outputs(outputs, facts.tasks, "weights_for_different_modes")  # or errors would name `outputs`
        return pooling.PoolingParams(
            outputs=sorted(outputs, key=lambda name: name != "tokens"), dimensions=dimensions, query=query
        ).resolve(facts)
    tasks = {"bi-encoder": "embed", "sparse": "sparse_embed"}
    task = tasks.get(facts.score_type or "", "token_embed")
    return pooling.PoolingParams(task=task, dimensions=dimensions, query=query).resolve(facts)


def check_pairs(pairs: Pairs, options: ScoreOptions, facts: Facts) -> None:
    """Refuses what cannot be compared by this model."""
    pairs.check(options.names)
    if options.instruction is not None and facts.score_template is None:
        raise BadRequest("This model reads no `instruction` when it scores; leave it out.", "instruction")
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if not 0 <= getattr(options, name) < facts.max_text_len:
            raise BadRequest(
                f"{name} must be non-negative and less than the model's length of {facts.max_text_len}.", name
            )
    if facts.score_type is None:
        raise no_scores(facts.tasks, facts.pooling.num_labels)


def cut_all(sides: Sequence[Side], most_tokens: int, tokenizer: Tokenizer) -> list[str]:
    """The texts of `sides`, which are nothing else, cut to so many tokens; 0 is no limit."""
    texts = [side for side in sides if isinstance(side, str)]
    return [tokenizer.cut_text(text, most_tokens) for text in texts] if most_tokens else texts


async def compute_scores(
    compared: Compared, facts: Facts, compute: Callable[[list[pooling.PooledText]], Awaitable[list[Vectors]]]
) -> list[float]:
    """The scores of texts, of which `compute` has an engine make vectors. Many are compared in a thread."""
    scorer = compare_all(compared, facts)
    items, scores = next(scorer), None
    while scores is None:
        try:
            answers = await compute(items)
        except ApiError as error:
            items = scorer.throw(error)  # the scorer may know another way
        else:
            sent = scorer, answers
            many = len(answers) > FEW_VECTORS
            items, scores = await asyncio.to_thread(_send, *sent) if many else _send(*sent)
    return scores


def _send(scorer: Scorer, answers: list[Vectors]) -> tuple[list[pooling.PooledText], list[float] | None]:
    """The next items to compute, or the scores."""
    try:
        return scorer.send(answers), None
    except StopIteration as end:
        return [], end.value


def compare_all(compared: Compared, facts: Facts) -> Scorer:
    """Makes the scorer."""
    if compared.weights is not None:
        return _compare_in_all_ways(compared, compared.weights)
    match facts.score_type:
        case "cross-encoder":
            return _compare_pairs(compared)
        case "bi-encoder":
            return _compare_vectors(compared, facts)
        case "late-interaction":
            return _compare_tokens(compared, facts)
        case "sparse":
            return _compare_sparse(compared, facts)
        case None:
            raise no_scores(facts.tasks, facts.pooling.num_labels)


def _read_together(
    texts: list[tuple[str, str]], options: ScoreOptions, facts: Facts, tokenizer: Tokenizer, first: int = 0
) -> list[pooling.PooledText]:
    """One item of each query with its document. `first` is the index of these among the request's."""
    params = pooling.PoolingParams(
        task="classify", use_activation=options.use_activation, dimensions=options.dimensions
    ).resolve(facts)
    instruction = options.instruction or pooling.find_prompt(None, facts)
    if facts.score_template is not None:
        kwargs = options.template_kwargs or {}
        write = partial(_write_pair, facts.score_template, tokenizer, instruction, kwargs)
        reader = pooling.TextReader(
            facts,
            tokenizer,
            ahead_of_pair_end(options.truncation, facts),
            add_special_tokens=False,
            name="pair",
            write=lambda text: write((text, text)),
        )
        return with_pair_end(reader.read_all([write(pair) for pair in texts], params, first), facts)
    texts = [(instruction + query, document) for query, document in texts]
    if facts.pooling.use_sep_token is False:
        reader = pooling.TextReader(facts, tokenizer, options.truncation, name="pair")
        return reader.read_all([query + document for query, document in texts], params, first)
    return _pair_items(texts, options.truncation, params, facts, tokenizer, first)


def ahead_of_pair_end(truncation: pooling.Truncation, facts: Facts) -> pooling.Truncation:
    """The same, with room for the token by which pairs are scored, if the model has one."""
    if facts.pooling.texts.pair_end is None or truncation.keep is None:
        return truncation
    return replace(truncation, keep=max(1, truncation.keep - 1))


def with_pair_end(items: list[pooling.PooledText], facts: Facts) -> list[pooling.PooledText]:
    """The pairs with the token by which they are scored, if the model has one that no text can have."""
    end = facts.pooling.texts.pair_end
    if end is None:
        return items
    ended = [[*unpack(item.tokens), end] for item in items]
    for index, ids in enumerate(ended):
        check_text_tokens(ids, "pair", index, facts)
    return [msgspec.structs.replace(item, tokens=ids) for item, ids in zip(items, ended, strict=True)]


def _pair_items(
    texts: Sequence[tuple[str, str]],
    truncation: pooling.Truncation,
    params: Pooling,
    facts: Facts,
    tokenizer: Tokenizer,
    first: int,
) -> list[pooling.PooledText]:
    """Puts two texts together as the tokenizer was made to, with separators and types of tokens."""
    if facts.pooling.texts.lower_case:
        texts = [(query.lower(), document.lower()) for query, document in texts]
    if truncation.keep is None:
        for index, (query, document) in enumerate(texts, first):
            check_text_characters(len(query) + len(document), f"pair {index}", facts, tokenizer)
    items: list[pooling.PooledText] = []
    for start in range(0, len(texts), pooling.TEXTS_AT_ONCE):
        some = texts[start : start + pooling.TEXTS_AT_ONCE]
        for ids, second_at in tokenizer.encode_pairs(some, truncation.keep, left=truncation.left):
            check_text_tokens(ids, "pair", first + len(items), facts)
            items.append(pooling.PooledText(ids, msgspec.structs.replace(params, second_at=second_at)))
    return items


def texts_and_pairs(
    inputs: Sequence[str | tuple[str, str]], options: ScoreOptions, facts: Facts, tokenizer: Tokenizer
) -> list[pooling.PooledText]:
    """Makes one item of one text or of a pair; errors count both kinds together."""
    params = pooling.PoolingParams(task="classify", use_activation=options.use_activation).resolve(facts)
    reader = pooling.TextReader(facts, tokenizer, options.truncation, name="inputs")
    items: list[pooling.PooledText] = []
    for place, one in enumerate(inputs):
        if isinstance(one, str):
            items += reader.read([one], params, place)
        else:
            items += _read_together([one], options, facts, tokenizer, place)
    return items


def _write_pair(
    template: str, tokenizer: Tokenizer, instruction: str, kwargs: Mapping[str, Any], pair: tuple[str, str]
) -> str:
    messages, kwargs = as_messages(pair, instruction, kwargs)
    return tokenizer.chat.render(messages, template=template, kwargs=kwargs)


def as_messages(
    pair: tuple[Side, Side], instruction: str, kwargs: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The messages that a template for scoring writes, and its arguments."""
    messages = [{"role": "query", "content": pair[0]}, {"role": "document", "content": pair[1]}]
    if instruction:  # templates look for it under either form
        messages.insert(0, {"role": "system", "content": instruction})
        kwargs = {**kwargs, "instruction": instruction}
    return messages, kwargs


def _compare_pairs(compared: Compared) -> Scorer:
    answers = yield compared.documents
    return [scalar(answer) for answer in answers]


def _compare_vectors(compared: Compared, facts: Facts) -> Scorer:
    count = len(compared.queries)
    answers = yield [*compared.queries, *compared.documents]
    similarity = facts.pooling.texts.similarity
    return [
        compare(answers[0 if count == 1 else i], vector, similarity)
        for i, vector in enumerate(answers[count:])
    ]


def _compare_sparse(compared: Compared, facts: Facts) -> Scorer:
    count, similarity = len(compared.queries), facts.pooling.texts.similarity
    answers = yield [*compared.queries, *compared.documents]
    return [
        compare_sparse(answers[0 if count == 1 else i], vector, similarity)
        for i, vector in enumerate(answers[count:])
    ]


def _compare_tokens(compared: Compared, facts: Facts) -> Scorer:
    """The vectors of a query's tokens stay in the worker, and each document is scored there."""
    is_mean = facts.pooling.texts.similarity == "meanmaxsim"
    scores: list[float] = []
    for query, document in (yield from _ask_all_late(compared)):
        scores.append(scalar(document) / _vectors_of(query) if is_mean else scalar(document))
    return scores


def _vectors_of(query: Vectors) -> float:
    """The number of the vectors of a query in late interaction."""
    return max(1.0, float(as_array(query)[1]))


def _compare_in_all_ways(compared: Compared, weights: Weights) -> Scorer:
    """The mean of the measures of all outputs, as FlagEmbedding computes it for BGE-M3: of dense vectors and
    of weights of tokens the inner product, and for tokens' vectors the mean of the best matches."""
    if weights[2]:
        answers = yield from _ask_all_late(compared)
    else:
        count = len(compared.queries)
        found = yield [*compared.queries, *compared.documents]
        answers = [(found[0 if count == 1 else i], one) for i, one in enumerate(found[count:])]
    scores: list[float] = []
    for index, (query, document) in enumerate(answers):
        ours, theirs = (
            by_task(vectors, item.params)
            for vectors, item in ((query, compared.query_of(index)), (document, compared.documents[index]))
        )
        total = 0.0
        if "embed" in ours:
            total += weights[0] * compare(ours["embed"], theirs["embed"], "dot")
        if "sparse_embed" in ours:
            total += weights[1] * compare_sparse(ours["sparse_embed"], theirs["sparse_embed"])
        if "token_embed" in ours:
            total += weights[2] * scalar(document) / _vectors_of(query)
        scores.append(total / sum(weights))
    return scores


Answered = tuple[Vectors, Vectors]
"""The answers to a query and to one of its documents."""


def _ask_all_late(compared: Compared) -> Generator[list[pooling.PooledText], list[Vectors], list[Answered]]:
    """Asks for all queries, some at a time, and for their documents."""
    queries, documents = compared.queries, compared.documents
    step = len(documents) if len(queries) == 1 else QUERIES_AT_ONCE
    answered: list[Answered] = []
    for start in range(0, len(documents), step):
        some = queries if len(queries) == 1 else queries[start : start + step]
        group = some, documents[start : start + step]
        try:
            answers = yield from _ask_late(*group)
        except Unavailable:  # the worker has dropped a query to make space for others
            answers = yield from _ask_late(*group)
        answered += answers
    return answered


def _ask_late(
    queries: list[pooling.PooledText], documents: list[pooling.PooledText]
) -> Generator[list[pooling.PooledText], list[Vectors], list[Answered]]:
    """Asks for one query and all documents, or for one query for each."""
    names = [uuid.uuid4().hex for _ in queries]
    own = yield [_renamed(item, late_query=name) for item, name in zip(queries, names, strict=True)]
    each = names * len(documents) if len(names) == 1 else names
    found = yield [_renamed(item, late_document=name) for item, name in zip(documents, each, strict=True)]
    return [(own[0 if len(own) == 1 else index], one) for index, one in enumerate(found)]


def _renamed(item: pooling.PooledText, **names: str) -> pooling.PooledText:
    return msgspec.structs.replace(item, params=msgspec.structs.replace(item.params, **names))
