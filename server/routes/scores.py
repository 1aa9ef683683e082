"""POST /score and /rerank, under all their names: the similarity of texts."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.scores import (
    Ranked,
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
    best_first,
)
from server.api.tei import EitherRerank, RankedText, TextsRequest
from server.http.endpoint import Endpoint
from server.http.sse import encode, json_response
from server.reading.readings import RERANK, SCORE
from server.routes.generation import frontend_of, respond
from server.routes.pooling_call import SCORES, PoolingCall
from server.routes.read import read

router = APIRouter(route_class=Endpoint, tags=["score"], dependencies=SCORES)


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score each pair of texts; one text may be compared with many."""
    terms = body.terms(frontend_of(request).facts)
    call = PoolingCall(request, terms, "score-")

    async def work() -> Response:
        scores = await call.score(await read(request, body, SCORE))
        return call.answer(Score(index=i, score=one) for i, one in enumerate(scores))

    return await respond(request, work())


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: EitherRerank, request: Request) -> Response:
    """Order the documents by how well they answer the query, the best first."""
    work = _rank_texts(body, request) if isinstance(body, TextsRequest) else _rank(body, request)
    return await respond(request, work)


async def _rank(body: RerankRequest, request: Request) -> Response:
    terms = body.terms(frontend_of(request).facts)
    call = PoolingCall(request, terms, "score-")
    found = await read(request, body, RERANK)
    scores = await call.score(found.compared)
    results = [Ranked(index, scores[index]) for index in best_first(scores)[: body.top_n or None]]
    if body.return_documents is not False:
        for one in results:
            one.document = RankedDocument(msgspec.Raw(found.texts[one.index]))
    ranking = Ranking(
        id=call.id,
        model=call.model,
        usage=call.usage(),
        cache_diagnosis=call.cache_diagnosis,
        results=results,
    )
    return json_response(ranking)


async def _rank_texts(body: TextsRequest, request: Request) -> Response:
    terms = body.terms(frontend_of(request).facts)
    call = PoolingCall(request, terms)
    found = await read(request, body, RERANK)
    scores = await call.score(found.compared)
    results = [RankedText(index, scores[index]) for index in best_first(scores)]
    if body.return_text:
        for one in results:
            one.text = msgspec.Raw(found.texts[one.index])
    return Response(encode(results), media_type="application/json")
