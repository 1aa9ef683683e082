"""The endpoints of text-embeddings-inference: /embed and its kin, /predict, /similarity and /info, and
what is posted to `/` there."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from server.access.request_state import state_of
from server.http.connection.body_limits import read_body
from server.http.endpoint import ENTRY, Endpoint, require_ready
from server.http.error_answers import DIALECT
from server.http.sse import JSON, encode, list_response
from server.model_facts import Facts, no_task
from server.requests.similarity import compare
from server.requests.vectors import as_array, as_json, sparse_pairs_json
from server.routes import pooling
from server.routes.answering import ask
from server.routes.model_choice import forward
from server.routes.pooling import label_of, pool_texts
from server.routes.request_context import frontend_of
from server.schemas.score_and_rerank import best_first
from server.schemas.tei import (
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    Prediction,
    PredictRequest,
    SimilarityRequest,
)
from worker.protocol import Vectors

router = APIRouter(route_class=Endpoint, tags=["text-embeddings-inference"])


@router.post("/embed")
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Embed each text. The answer is nothing but numbers."""
    return await _vectors(body, request)


@router.post("/embed_all")
async def embed_all(body: EmbedAllRequest, request: Request) -> Response:
    """Embed each token of each text."""
    return await _vectors(body, request)


@router.post("/embed_sparse")
async def embed_sparse(body: EmbedSparseRequest, request: Request) -> Response:
    """Return a sparse vector of each text, by models such as SPLADE and BGE-M3."""
    answer = await ask(request, body, body.terms, "", pool_texts)
    return list_response(map(sparse_pairs_json, answer.vectors))


async def _vectors(body: EmbedRequest | EmbedAllRequest, request: Request) -> Response:
    answer = await ask(request, body, body.terms, "", pool_texts)
    return list_response(map(as_json, answer.vectors))


@router.post("/predict")
async def predict(body: PredictRequest, request: Request) -> Response:
    """Classify each text or pair of texts. Labels are sorted by score, the highest first."""
    answer = await ask(request, body, body.terms, "", pool_texts)
    predictions = (encode(_predictions(vectors, answer.head.facts)) for vectors in answer.vectors)
    return list_response(predictions) if answer.texts.many else Response(next(predictions), media_type=JSON)


def _predictions(vectors: Vectors, facts: Facts) -> list[Prediction]:
    scores: list[float] = as_array(vectors).tolist()
    return [Prediction(scores[i], label_of(i, facts) or f"LABEL_{i}") for i in best_first(scores)]


@router.post("/similarity")
async def similarity(body: SimilarityRequest, request: Request) -> Response:
    """Compare sentences with a source sentence, by the measure that the checkpoint names."""
    answer = await ask(request, body, body.terms, "", pool_texts)
    source, *others = answer.vectors
    measure = answer.head.facts.pooling.texts.similarity
    return list_response(encode(compare(source, other, measure)) for other in others)


@router.get("/info", dependencies=[Depends(require_ready)])
async def info(request: Request) -> Response:
    """Describe the model in the words of text-embeddings-inference."""
    facts = frontend_of(request).facts
    worker = facts.ready.worker
    return JSONResponse(
        {
            "model_id": facts.root,
            "model_sha": None,
            "model_dtype": worker.dtype,
            "model_type": _model_type(facts),
            "max_concurrent_requests": worker.max_num_seqs,
            "max_input_length": facts.max_text_len,
            "max_batch_tokens": worker.max_num_batched_tokens,
            "max_batch_requests": worker.max_num_seqs,
            "max_client_batch_size": facts.limits.inputs,
            "auto_truncate": False,
            "tokenization_workers": 1,
            "version": version("facet-serve"),
            "tasks": facts.tasks,
        }
    )


def _model_type(facts: Facts) -> dict[str, object] | str:
    if "classify" in facts.tasks:
        labels = facts.pooling.labels or [f"LABEL_{i}" for i in range(facts.pooling.num_labels)]
        names = {str(i): label for i, label in enumerate(labels)}
        kind = "reranker" if facts.score_type == "cross-encoder" else "classifier"
        return {kind: {"id2label": names, "label2id": {label: int(i) for i, label in names.items()}}}
    if "embed" in facts.tasks:
        modes = facts.pooling.modes
        return {"embedding": {"pooling": "+".join(modes).lower() or "default"}}
    return facts.tasks[0]


class _Posted(msgspec.Struct):
    """A body for a model that embeds."""

    inputs: msgspec.Raw = msgspec.Raw(b"")


@router.post("/", dependencies=ENTRY)
async def post_root(request: Request) -> Response:
    """Answer as /embed, /similarity, /predict or TEI's /rerank does, by what the model is made for.

    Hugging Face's `InferenceClient(model=URL)` posts here."""
    raw = bytes(await read_body(request.receive))
    path, state = _path_for(raw, frontend_of(request).facts), state_of(request.scope)
    state.head = {**state.head, DIALECT: b"tei"}
    return await forward(request, raw, path, (router, pooling.scores))


def _path_for(raw: bytes, facts: Facts) -> str:
    """Returns the path of the endpoint that does what the model is for. Of one that embeds, Hugging Face's
    client asks for vectors of texts, and with an object for the similarity of one text to others."""
    if facts.score_type == "cross-encoder":
        return "/rerank"
    if "embed" in facts.tasks:
        return "/similarity" if _is_object(raw) else "/embed"
    if "classify" in facts.tasks:
        return "/predict"
    raise no_task("embed", facts.tasks)


def _is_object(raw: bytes) -> bool:
    try:
        return bytes(msgspec.json.decode(raw, type=_Posted).inputs).startswith(b"{")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
