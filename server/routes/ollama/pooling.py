"""POST /api/embed, /api/embeddings and /api/rerank."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from server.http.endpoint import Endpoint
from server.http.sse import encode, json_response
from server.reading.body_table import ReadTexts
from server.requests.scoring import Compared
from server.requests.vectors import as_json
from server.routes.pooling_call import PoolingCall, written_list
from server.routes.request_context import read_texts
from server.schemas.ollama import answers as api
from server.schemas.ollama.requests import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaRerankRequest
from server.schemas.scores import best_first

router = APIRouter(route_class=Endpoint, tags=["Ollama"])


@router.post("/api/embed")
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Return a vector of the length 1 for each text."""
    call = PoolingCall(request, body)
    found: ReadTexts = await read_texts(request, body)
    vectors = await call.run(found.items)
    head = api.Embedded(model=call.model)
    head.measure(call.times, call.tokens)
    before, _, after = encode(head).partition(b'"embeddings":[]')
    return written_list(map(as_json, vectors), before + b'"embeddings":[', b"]" + after)


@router.post("/api/embeddings")
async def embed_prompt(body: OllamaEmbeddingsRequest, request: Request) -> Response:
    """Return the vector of one text, in `prompt`, as the model makes it."""
    call = PoolingCall(request, body)
    found: ReadTexts = await read_texts(request, body)
    [vector] = await call.run(found.items)
    return Response(b'{"embedding":%s}' % as_json(vector), media_type="application/json")


@router.post("/api/rerank")
async def rerank(body: OllamaRerankRequest, request: Request) -> Response:
    """Order the documents by how well they answer the query, the best first. Ollama has no such endpoint yet;
    this is how its clients expect it."""
    call = PoolingCall(request, body)
    compared: Compared = await read_texts(request, body)
    found = await call.score(compared)
    results = [api.RankedDocument(index, found[index]) for index in best_first(found)[: body.top_n or None]]
    for one in results if compared.repeated else ():
        one.document = msgspec.Raw(compared.repeated[one.index])
    answer = api.Reranked(model=call.model, results=results)
    answer.measure(call.times, call.tokens)
    return json_response(answer)
