"""Vectors, labels or scores of texts: /v1/embeddings, /v2/embed, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from server.errors import BadRequest
from server.http.endpoint import Endpoint
from server.http.sse import encode, json_response
from server.model_facts import Facts
from server.reading.body_table import (
    ReadTexts,
)
from server.requests.pooling import PooledText
from server.requests.scoring import FEW_VECTORS, Compared
from server.requests.vectors import (
    VectorForm,
    as_array,
    as_json,
    by_task,
    label_probs,
    sparse_json,
)
from server.routes.pooling_call import (
    NAMES,
    PoolingCall,
    maybe_in_thread,
    require_outputs,
)
from server.routes.request_context import read_texts
from server.schemas import pooling_bodies as bodies
from server.schemas.cohere import (
    ApiVersion,
    BilledUnits,
    CohereEmbedded,
    CohereEmbeddings,
    CohereRequest,
    Meta,
)
from server.schemas.scores import ClassifyRequest, RankedParts, RerankRequest, Score, ScoreRequest, best_first
from server.schemas.tei import TextsRequest
from server.schemas.vendor_bodies.infinity import (
    InfinityClasses,
    InfinityClassify,
    InfinityRerank,
    label_scores,
)
from server.schemas.vendor_bodies.voyage import VoyageEmbeddingRequest, VoyageRerank
from worker.protocol import Task, Vectors

router = APIRouter(route_class=Endpoint, tags=["pool"])
scores = APIRouter(route_class=Endpoint, tags=["score"])

MOST_IN_A_HEADER = 256
"""The most vectors whose places a header `metadata` can list without being too long for clients."""


@router.post("/v1/embeddings")
@router.post("/embeddings")
async def create_embeddings(
    body: bodies.EmbeddingRequest | VoyageEmbeddingRequest, request: Request
) -> Response:
    """A vector for each text, or for each conversation: with OpenAI's, vLLM's and Jina's fields, or Voyage's,
    if X-Facet-Dialect names it."""
    return await _embed(body, request)


async def _embed(body: bodies.EmbeddingRequest, request: Request) -> Response:
    call = PoolingCall(request, body, "embd-")
    found: ReadTexts = await read_texts(request, body)

    def entry(index: int, written: dict[Task, msgspec.Raw]) -> bodies.Embedding:
        return bodies.Embedding(
            index=index,
            embedding=written.get("embed", UNSET),
            sparse=written.get("sparse_embed", UNSET),
            tokens=written.get("token_embed", UNSET),
        )

    return await _pool(call, body, found.items, entry)


@router.post("/embeddings_image")
async def embed_pictures(body: bodies.PicturesRequest, request: Request) -> Response:
    """A vector for each picture, as Infinity has it."""
    return await _embed(body, request)


@router.post("/pooling")
async def pool(body: bodies.PoolingRequest, request: Request) -> Response:
    """Vectors, or labels, for each text or for each of its tokens."""
    call = PoolingCall(request, body, "pooling-")
    found: ReadTexts = await read_texts(request, body)

    def entry(index: int, written: dict[Task, msgspec.Raw]) -> bodies.PoolingData:
        named = {NAMES[task]: each for task, each in written.items()} if body.outputs is not None else None
        return bodies.PoolingData(index=index, data=named or next(iter(written.values())))

    return await _pool(call, body, found.items, entry)


@router.post("/classify")
async def classify(body: ClassifyRequest | InfinityClassify, request: Request) -> Response:
    """The probability of each label, and the likeliest of them; or Infinity's form, if X-Facet-Dialect names
    it."""
    call = PoolingCall(request, body, "classify-")
    learned = call.facts.ready.worker.cosine_scores
    if learned is not None and body.labels is None:
        raise BadRequest(
            "This model compares: give `labels`, whole texts that each input is compared with.", "labels"
        )
    vectors = await call.run((await read_texts(request, body)).items)
    if body.labels is not None and learned is not None:
        found, labels = list(label_probs(vectors, len(body.labels), learned)), body.labels
    else:
        found, labels = [as_array(one) for one in vectors], call.facts.pooling.labels
    if isinstance(body, InfinityClassify):
        data = [label_scores(one.tolist(), labels) for one in found]
        usage, created = call.usage(), call.created
        classes = InfinityClasses(id=call.id, model=call.model, created=created, usage=usage, data=data)
        return json_response(classes)
    return call.answer(_labelled(i, one, labels) for i, one in enumerate(found))


@router.post("/v2/embed")
async def embed_for_cohere(body: CohereRequest, request: Request) -> Response:
    """Embed texts like Cohere's API: vectors in each of the types asked for."""
    call = PoolingCall(request, body)
    found: ReadTexts = await read_texts(request, body)
    params = found.items[0].params
    require_outputs(request, params)
    outputs = [by_task(one, params) for one in await call.run(found.items)]
    return await maybe_in_thread(
        lambda: json_response(_for_cohere(call, body, outputs, found.repeated)),
        len(outputs) > FEW_VECTORS,
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


async def _pool(
    call: PoolingCall,
    body: bodies.VectorsBody,
    items: list[PooledText],
    entry: Callable[[int, dict[Task, msgspec.Raw]], msgspec.Struct],
) -> Response:
    """The vectors of the items: as JSON, where `entry` makes one of the list, or as bytes."""
    params = items[0].params
    require_outputs(call.request, params)
    is_bytes = body.encoding_format in ("bytes", "bytes_only")
    if is_bytes and (params.outputs or params.task == "sparse_embed"):
        raise BadRequest(
            "An answer of bytes has place for one output, dense or tokens. Use float or base64.", "outputs"
        )
    is_plain = body.encoding_format == "float" and body.embed_dtype == "float32"
    if params.task == "sparse_embed" and not params.outputs and not is_plain:
        raise BadRequest(
            "Weights of tokens are written as numbers: leave out `encoding_format` and `embed_dtype`.",
            "encoding_format",
        )
    if body.encoding_format == "bytes" and len(items) > MOST_IN_A_HEADER:
        raise BadRequest(
            f"The encoding format bytes takes at most {MOST_IN_A_HEADER} texts, got {len(items)}: more would "
            "not fit the header `metadata`. Use bytes_only or base64.",
            "encoding_format",
        )
    vectors = await call.run(items)
    if is_bytes:
        return await maybe_in_thread(lambda: _bytes(call, body, vectors), len(vectors) > FEW_VECTORS)
    outputs = [by_task(one, params) for one in vectors]
    write = {task: _writer([one[task] for one in outputs], task, body, call.facts) for task in outputs[0]}
    return call.answer(
        entry(index, {task: write[task](each) for task, each in one.items()})
        for index, one in enumerate(outputs)
    )


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


def _bytes(call: PoolingCall, form: bodies.VectorsBody, vectors: Sequence[Vectors]) -> Response:
    """The bare numbers, one vector after the other, with a header that tells them apart if asked for."""
    written = form_of(vectors, form, call.facts)
    parts = [written.bytes(one) for one in vectors]
    headers = {}
    if form.encoding_format == "bytes":
        metadata = {
            "id": call.id,
            "created": call.created,
            "model": call.model,
            "data": list(_ranges(form, vectors, parts)),
            "usage": call.usage(),
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


def _for_cohere(
    call: PoolingCall,
    body: CohereRequest,
    outputs: Sequence[dict[Task, Vectors]],
    texts: Sequence[bytes],
) -> CohereEmbedded:
    vectors, types = (
        [one["embed"] for one in outputs if "embed" in one],
        body.types if "embed" in outputs[0] else [],
    )
    if ("binary" in types or "ubinary" in types) and vectors[0].shape[-1] % 8:
        raise BadRequest(
            f"Binary vectors need a number of dimensions that eight divides, not {vectors[0].shape[-1]}.",
            "embedding_types",
        )
    ranges = np.array(call.facts.int8_ranges, np.float32) if call.facts.int8_ranges else None
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
        id=call.id,
        embeddings=embeddings,
        texts=[msgspec.Raw(text) for text in texts],
        meta=Meta(ApiVersion(), BilledUnits(input_tokens=call.tokens)),
    )


@scores.post("/score")
@scores.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score each pair of texts; one text may be compared with many."""
    call = PoolingCall(request, body, "score-")
    found = await call.score(await read_texts(request, body))
    return call.answer(Score(index=i, score=one) for i, one in enumerate(found))


@scores.post("/rerank")
@scores.post("/v1/rerank")
@scores.post("/v2/rerank")
async def rerank(
    body: RerankRequest | TextsRequest | InfinityRerank | VoyageRerank, request: Request
) -> Response:
    """Order the documents by how well they answer the query, the best first: as Cohere's, Jina's and vLLM's
    servers do, or at /rerank and /v1/rerank in the form that X-Facet-Dialect names."""
    call = PoolingCall(request, body, "score-")
    compared: Compared = await read_texts(request, body)
    found = await call.score(compared)
    best = [(index, found[index]) for index in best_first(found)]
    parts = RankedParts(call.id, call.model, call.created, call.usage(), best, compared.repeated)
    return Response(encode(body.write(parts)), media_type="application/json")
