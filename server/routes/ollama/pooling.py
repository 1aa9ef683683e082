"""POST /api/embed, /api/embeddings and /api/rerank."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from server.http.endpoint import Endpoint
from server.http.sse import JSON, encode, json_response, list_response
from server.requests.vectors import as_json
from server.routes.answering import ask
from server.routes.pooling import compare_texts, pool_texts
from server.schemas.ollama import answers as api
from server.schemas.ollama.requests import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaRerankRequest
from server.schemas.score_and_rerank import best_first

router = APIRouter(route_class=Endpoint, tags=["Ollama"])


@router.post("/api/embed")
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Embed each text as a vector of length 1."""
    answer = await ask(request, body, body.terms, "", pool_texts)
    around = api.Embedded(model=answer.head.model)
    around.measure(answer.end.times, answer.end.counts.prompt)
    return list_response(map(as_json, answer.vectors), encode(around))


@router.post("/api/embeddings")
async def embed_prompt(body: OllamaEmbeddingsRequest, request: Request) -> Response:
    """Embed one text. The vector is not normalized unless the model does so."""
    answer = await ask(request, body, body.terms, "", pool_texts)
    vector = next(map(as_json, answer.vectors), b"[]")
    return Response(b'{"embedding":%s}' % vector, media_type=JSON)


@router.post("/api/rerank")
async def rerank(body: OllamaRerankRequest, request: Request) -> Response:
    """Order the documents by how well they answer the query, the best first. Ollama has no such endpoint yet;
    this is how its clients expect it."""
    answer = await ask(request, body, body.terms, "", compare_texts)
    found, repeated = answer.scores, answer.texts.repeated
    results = [api.RankedDocument(index, found[index]) for index in best_first(found)[: body.top_n or None]]
    for one in results if repeated else ():
        one.document = msgspec.Raw(repeated[one.index])
    ranked = api.Reranked(model=answer.head.model, results=results)
    ranked.measure(answer.end.times, answer.end.counts.prompt)
    return json_response(ranked)
