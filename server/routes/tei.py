"""The endpoints of text-embeddings-inference: /embed, /embed_all, /predict, /similarity and /info."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from server.api.scores import best_first
from server.api.tei import EmbedAllRequest, EmbedRequest, Prediction, PredictRequest, SimilarityRequest
from server.http.endpoint import Endpoint
from server.http.sse import encode
from server.requests.facts import Facts
from server.requests.pooling import PoolingParams, find_prompt, total_characters
from server.requests.scoring import texts_and_pairs
from server.requests.task_names import require_task
from server.requests.vectors import as_array, as_json, compare
from server.routes.generation import frontend_of, require_ready, respond
from server.routes.pooling import label_of
from server.routes.pooling_call import CLASSIFIES, EMBEDS, POOLS, TEXTS_AT_ONCE, PoolingCall, maybe_in_thread
from server.text.tokenizer import LONG_TEXT
from worker.protocol import Vectors

router = APIRouter(route_class=Endpoint, tags=["text-embeddings-inference"])


@router.post("/embed", dependencies=EMBEDS)
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Embed each text. The answer is nothing but numbers."""
    return await respond(request, _vectors(body, body.params("embed"), request))


@router.post("/embed_all", dependencies=POOLS)
async def embed_all(body: EmbedAllRequest, request: Request) -> Response:
    """Embed each token of each text."""
    require_task("token_embed", frontend_of(request).facts.tasks)
    params = PoolingParams(task="token_embed")
    return await respond(request, _vectors(body, params, request))


async def _vectors(body: EmbedRequest | EmbedAllRequest, params: PoolingParams, request: Request) -> Response:
    facts = frontend_of(request).facts
    call = PoolingCall(request, body.terms(facts))
    prompt = find_prompt(body.prompt_name, facts)
    vectors = await call.run(await call.items(body.inputs or [], params, prompt, name="inputs"))
    return _json([msgspec.Raw(as_json(one)) for one in vectors])


@router.post("/predict", dependencies=CLASSIFIES)
async def predict(body: PredictRequest, request: Request) -> Response:
    """Classify each text or pair of texts. Labels are sorted by score, the highest first."""
    facts = frontend_of(request).facts
    terms = body.terms(facts)
    call = PoolingCall(request, terms)
    many = isinstance(body.inputs, list)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    params = PoolingParams(task="classify", use_activation=False if body.raw_scores else None)

    async def work() -> Response:
        call.check_count(len(inputs), "inputs")
        asked, tokenizer = params.resolve(facts), call.frontend.tokenizer
        texts = [text for one in inputs for text in ([one] if isinstance(one, str) else one)]
        items = await maybe_in_thread(
            lambda: texts_and_pairs(inputs, terms.truncation, asked, facts, tokenizer),
            len(inputs) > TEXTS_AT_ONCE or total_characters(texts) >= LONG_TEXT,
        )
        predictions = [_predictions(vectors, facts) for vectors in await call.run(items)]
        return _json(predictions if many else predictions[0])

    return await respond(request, work())


def _predictions(vectors: Vectors, facts: Facts) -> list[Prediction]:
    scores: list[float] = as_array(vectors).tolist()
    return [Prediction(scores[i], label_of(i, facts) or f"LABEL_{i}") for i in best_first(scores)]


@router.post("/similarity", dependencies=EMBEDS)
async def similarity(body: SimilarityRequest, request: Request) -> Response:
    """Compare each sentence with the source sentence, by the measure that the checkpoint names."""
    facts = frontend_of(request).facts
    call = PoolingCall(request, body.parameters.terms(facts))
    prompt = find_prompt(body.parameters.prompt_name, facts)

    async def work() -> Response:
        texts = [body.inputs.source_sentence, *body.inputs.sentences]
        source, *others = await call.run(
            await call.items(texts, PoolingParams(task="embed"), prompt, name="sentences")
        )
        return _json([compare(source, other, facts.pooling.texts.similarity) for other in others])

    return await respond(request, work())


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


def _json(content: object) -> Response:
    return Response(encode(content), media_type="application/json")
