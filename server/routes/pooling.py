"""Vectors, labels or scores of texts: /v1/embeddings, /v2/embed, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from server.errors import BadRequest
from server.frontend.asks.parts import Terms
from server.frontend.asks.pooling import Compare, ComparedAnswer, Pool, PooledAnswer
from server.http.endpoint import Endpoint
from server.http.sse import JSON, encode, json_response, list_response
from server.model_facts import OUTPUTS, Facts
from server.options.server_flags import ServerConfig
from server.requests.pooling import ReadTexts
from server.requests.scoring import FEW_VECTORS, Compared
from server.requests.similarity import label_probs
from server.requests.vectors import (
    VectorForm,
    as_array,
    as_json,
    by_task,
    sparse_json,
)
from server.routes.answering import ask, maybe_in_thread
from server.schemas import pooling_bodies as bodies
from server.schemas.cohere_embed import (
    ApiVersion,
    BilledUnits,
    CohereEmbedded,
    CohereEmbeddings,
    CohereRequest,
    Meta,
)
from server.schemas.score_and_rerank import (
    ClassifyRequest,
    RankedParts,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
    best_first,
)
from server.schemas.tei import TextsRequest
from server.schemas.vendor_bodies.infinity import (
    InfinityClasses,
    InfinityClassify,
    InfinityRerank,
    label_scores,
)
from server.schemas.vendor_bodies.voyage import VoyageEmbeddingRequest, VoyageRerank
from worker.protocol import Pooling, Task, Vectors

router = APIRouter(route_class=Endpoint, tags=["Embeddings and classification"])
scores = APIRouter(route_class=Endpoint, tags=["Scoring and reranking"])

MOST_IN_A_HEADER = 256
"""The most vectors whose places a header `metadata` can list without being too long for clients."""
_AS_BYTES = ("bytes", "bytes_only")
_NAMES = {task: name for name, task in OUTPUTS.items()}
"""The names of outputs by their tasks."""


def pool_texts(texts: ReadTexts, terms: Terms, config: ServerConfig) -> Pool:
    """What an endpoint asks for that pools the texts of its body, and checks nothing more."""
    return Pool(terms=terms, texts=texts)


def compare_texts(compared: Compared, terms: Terms, config: ServerConfig) -> Compare:
    """What an endpoint asks for that compares the texts of its body."""
    return Compare(terms=terms, texts=compared)


@router.post("/v1/embeddings")
@router.post("/embeddings")
async def create_embeddings(
    body: bodies.EmbeddingRequest | VoyageEmbeddingRequest, request: Request
) -> Response:
    """Embed each text or conversation.

    With the fields of OpenAI, vLLM and Jina, or those of Voyage if X-Facet-Dialect names it."""
    return await _answer_vectors(body, request, "embd-", _embedding)


@router.post("/embeddings_image")
async def embed_pictures(body: bodies.PicturesRequest, request: Request) -> Response:
    """Embed each picture, as Infinity does."""
    return await _answer_vectors(body, request, "embd-", _embedding)


@router.post("/pooling")
async def pool(body: bodies.PoolingRequest, request: Request) -> Response:
    """Return vectors or labels for each text, or for each of its tokens."""
    return await _answer_vectors(body, request, "pooling-", partial(_pooling_data, body))


Entry = Callable[[int, dict[Task, msgspec.Raw]], msgspec.Struct]
"""Makes the entry of a text in an answer from its outputs as JSON."""


async def _answer_vectors(body: bodies.VectorsBody, request: Request, prefix: str, entry: Entry) -> Response:
    answer = await ask(request, body, body.terms, prefix, partial(read_vectors, body))
    return await maybe_in_thread(
        partial(write_vectors, body, answer, entry), len(answer.vectors) > FEW_VECTORS
    )


def read_vectors(body: bodies.VectorsBody, texts: ReadTexts, terms: Terms, config: ServerConfig) -> Pool:
    """What a body asks for that says in which form vectors are written. Raises the error for a form that
    these cannot have."""
    items = texts.items
    params, encoding = items[0].params, body.encoding_format
    _require_outputs(terms, params)
    if encoding in _AS_BYTES and (params.outputs or params.task == "sparse_embed"):
        raise BadRequest(
            "An answer of bytes has place for one output, dense or tokens. Use float or base64.", "outputs"
        )
    is_plain = encoding == "float" and body.embed_dtype == "float32"
    if params.task == "sparse_embed" and not params.outputs and not is_plain:
        raise BadRequest(
            "Weights of tokens are written as numbers: leave out `encoding_format` and `embed_dtype`.",
            "encoding_format",
        )
    if encoding == "bytes" and len(items) > MOST_IN_A_HEADER:
        raise BadRequest(
            f"The encoding format bytes takes at most {MOST_IN_A_HEADER} texts, got {len(items)}: more would "
            "not fit the header `metadata`. Use bytes_only or base64.",
            "encoding_format",
        )
    return Pool(terms=terms, texts=texts)


def _require_outputs(terms: Terms, params: Pooling) -> None:
    """Requires the right to each of the outputs that a body names."""
    for task in (params.task, *params.outputs):
        # The right to align is checked where recordings are, and no body can ask for the logits of options.
        if task not in ("align", "decide"):
            terms.state.require_right(task)


def write_vectors(body: bodies.VectorsBody, answer: PooledAnswer, entry: Entry) -> Response:
    """Writes vectors as JSON, where `entry` makes one of the list, or as bytes."""
    if body.encoding_format in _AS_BYTES:
        return _bytes(body, answer)
    params, facts, vectors = answer.texts.items[0].params, answer.head.facts, answer.vectors
    columns: dict[Task, Sequence[Vectors]] = {params.task: vectors}
    for task in params.outputs:
        columns[task] = [one.others[task] for one in vectors]
    written = [map(_writer(each, task, body, facts), each) for task, each in columns.items()]
    rows = enumerate(zip(*written, strict=True))
    return list_of(answer, (entry(index, dict(zip(columns, row, strict=True))) for index, row in rows))


def _embedding(index: int, written: dict[Task, msgspec.Raw]) -> bodies.Embedding:
    return bodies.Embedding(
        index=index,
        embedding=written.get("embed", UNSET),
        sparse=written.get("sparse_embed", UNSET),
        tokens=written.get("token_embed", UNSET),
    )


def _pooling_data(
    body: bodies.PoolingRequest, index: int, written: dict[Task, msgspec.Raw]
) -> bodies.PoolingData:
    named = {_NAMES[task]: each for task, each in written.items()} if body.outputs is not None else None
    return bodies.PoolingData(index=index, data=named or next(iter(written.values())))


def list_of(answer: PooledAnswer | ComparedAnswer, entries: Iterable[msgspec.Struct]) -> Response:
    """The answer in the shape of the OpenAI API: a list with an entry for each text."""
    head = answer.head
    around = bodies.PooledList(id=head.id, created=head.created, model=head.model, usage=answer.usage)
    return list_response(map(encode, entries), encode(around))


@router.post("/classify")
async def classify(body: ClassifyRequest | InfinityClassify, request: Request) -> Response:
    """Classify each text: the probability of each label, and the likeliest one.

    In Infinity's form if X-Facet-Dialect names it."""
    answer = await ask(request, body, body.terms, "classify-", pool_texts)
    return write_classes(body, answer)


def write_classes(body: ClassifyRequest, answer: PooledAnswer) -> Response:
    head, vectors = answer.head, answer.vectors
    learned = head.facts.ready.worker.cosine_scores
    if body.labels is not None and learned is not None:
        found, labels = list(label_probs(vectors, len(body.labels), learned)), body.labels
    else:
        found, labels = [as_array(one) for one in vectors], head.facts.pooling.labels
    if isinstance(body, InfinityClassify):
        data = [label_scores(one.tolist(), labels) for one in found]
        named = {"id": head.id, "model": head.model, "created": head.created}
        return json_response(InfinityClasses(**named, usage=answer.usage, data=data))
    return list_of(answer, (_labelled(i, one, labels) for i, one in enumerate(found)))


@router.post("/v2/embed")
@router.post("/cohere/v2/embed")
async def embed_for_cohere(body: CohereRequest, request: Request) -> Response:
    """Embed texts like Cohere's API: vectors in each of the types asked for."""
    answer = await ask(request, body, body.terms, "", read_for_cohere)
    return await maybe_in_thread(
        lambda: json_response(write_for_cohere(body, answer)), len(answer.vectors) > FEW_VECTORS
    )


def read_for_cohere(texts: ReadTexts, terms: Terms, config: ServerConfig) -> Pool:
    _require_outputs(terms, texts.items[0].params)
    return Pool(terms=terms, texts=texts)


def write_for_cohere(body: CohereRequest, answer: PooledAnswer) -> CohereEmbedded:
    params, facts = answer.texts.items[0].params, answer.head.facts
    outputs = [by_task(one, params) for one in answer.vectors]
    vectors = [one["embed"] for one in outputs if "embed" in one]
    types = body.types if vectors else []
    if ("binary" in types or "ubinary" in types) and vectors[0].shape[-1] % 8:
        raise BadRequest(
            f"Binary vectors need a number of dimensions that eight divides, not {vectors[0].shape[-1]}.",
            "embedding_types",
        )
    ranges = np.array(facts.int8_ranges, np.float32) if facts.int8_ranges else None
    forms = {
        kind: VectorForm.of(
            vectors,
            "float32" if kind in ("float", "base64") else kind,
            base64=kind == "base64",
            ranges=ranges,
        )
        for kind in types
    }
    embeddings = CohereEmbeddings(**{kind: list(map(form.write, vectors)) for kind, form in forms.items()})
    if "sparse_embed" in outputs[0]:
        embeddings.sparse = [msgspec.Raw(sparse_json(one["sparse_embed"])) for one in outputs]
    if "token_embed" in outputs[0]:
        embeddings.tokens = [msgspec.Raw(as_json(one["token_embed"])) for one in outputs]
    return CohereEmbedded(
        id=answer.head.id,
        embeddings=embeddings,
        texts=[msgspec.Raw(text) for text in answer.texts.repeated],
        meta=Meta(ApiVersion(), BilledUnits(input_tokens=answer.end.counts.prompt)),
    )


def _labelled(index: int, probs: np.ndarray, labels: Sequence[str]) -> bodies.Classification:
    """The class of an input. `labels` is empty if the model's files do not name them."""
    return bodies.Classification(
        index=index,
        label=labels[int(np.argmax(probs))] if labels else None,
        probs=probs.tolist(),
        num_classes=len(probs),
    )


def label_of(index: int, facts: Facts) -> str | None:
    """The name of a label; None if the model's files do not name its labels."""
    labels = facts.pooling.labels
    return labels[index] if labels else None


def _writer(
    vectors: Sequence[Vectors], task: Task, body: bodies.VectorsBody, facts: Facts
) -> Callable[[Vectors], msgspec.Raw]:
    if task == "sparse_embed":
        return lambda one: msgspec.Raw(sparse_json(one))
    return form_of(vectors, body, facts).write


def form_of(vectors: Sequence[Vectors], body: bodies.VectorsBody, facts: Facts) -> VectorForm:
    """The form in which a request wants some vectors."""
    ranges = np.array(facts.int8_ranges, np.float32) if facts.int8_ranges else None
    is_base64 = body.encoding_format == "base64"
    return VectorForm.of(vectors, body.embed_dtype, body.endianness, base64=is_base64, ranges=ranges)


def _bytes(form: bodies.VectorsBody, answer: PooledAnswer) -> Response:
    """The bare numbers, one vector after the other, with a header that tells them apart if asked for."""
    head, vectors, headers = answer.head, answer.vectors, {}
    written = form_of(vectors, form, head.facts)
    parts = [written.bytes(one) for one in vectors]
    if form.encoding_format == "bytes":
        metadata = {
            "id": head.id,
            "created": head.created,
            "model": head.model,
            "data": list(_ranges(form, vectors, parts)),
            "usage": answer.usage,
        }
        headers["metadata"] = encode(metadata).decode("ascii", "backslashreplace")
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


def _ranges(
    form: bodies.VectorsBody, vectors: Sequence[Vectors], parts: Sequence[bytes]
) -> Iterator[bodies.ByteRange]:
    start = 0
    for index, (one, part) in enumerate(zip(vectors, parts, strict=True)):
        yield bodies.ByteRange(
            index=index,
            embed_dtype=form.embed_dtype,
            endianness=form.endianness,
            start=start,
            end=start + len(part),
            shape=one.shape,
        )
        start += len(part)


@scores.post("/score")
@scores.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts, or one text with many."""
    answer = await ask(request, body, body.terms, "score-", compare_texts)
    return list_of(answer, (Score(index=i, score=one) for i, one in enumerate(answer.scores)))


@scores.post("/rerank")
@scores.post("/v1/rerank")
@scores.post("/reranking")
@scores.post("/v1/reranking")
@scores.post("/v2/rerank")
@scores.post("/cohere/v2/rerank")
async def rerank(
    body: RerankRequest | TextsRequest | InfinityRerank | VoyageRerank, request: Request
) -> Response:
    """Order documents by how well they answer the query, the best first.

    As the servers of Cohere, Jina and vLLM do, or at /rerank and /v1/rerank in the form that X-Facet-Dialect
    names."""
    answer = await ask(request, body, body.terms, "score-", compare_texts)
    head, found = answer.head, answer.scores
    best = [(index, found[index]) for index in best_first(found)]
    parts = RankedParts(head.id, head.model, head.created, answer.usage, best, answer.texts.repeated)
    ranking = body.write(parts)
    if isinstance(ranking, Ranking) and request.url.path.endswith("/v2/rerank"):  # clients of Cohere's alone
        ranking.meta = Meta(ApiVersion(), BilledUnits(input_tokens=answer.usage.prompt_tokens))
    return Response(encode(ranking), media_type=JSON)
