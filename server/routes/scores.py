"""POST /score and /rerank, under all their names: the similarity of texts."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.scores import Ranked, RankedDocument, Ranking, Score, ScoreRequest, best_first
from server.api.tei import EitherRerank, RankedText, TextsRequest
from server.http.endpoint import Endpoint
from server.http.sse import encode, json_response
from server.reading.body_table import RERANK, SCORE
from server.routes.pooling_call import SCORES, PoolingCall
from server.routes.request_context import cancelled_when_client_leaves, read_texts

router = APIRouter(route_class=Endpoint, tags=["score"], dependencies=SCORES)


@router.post("/score")
@router.post("/v1/score")
@cancelled_when_client_leaves
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score each pair of texts; one text may be compared with many."""
    call = PoolingCall(request, body, "score-")
    scores = await call.score(await read_texts(request, body, SCORE))
    return call.answer(Score(index=i, score=one) for i, one in enumerate(scores))


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
@cancelled_when_client_leaves
async def rerank(body: EitherRerank, request: Request) -> Response:
    """Order the documents by how well they answer the query, the best first."""
    call = PoolingCall(request, body, "" if isinstance(body, TextsRequest) else "score-")
    compared = await read_texts(request, body, RERANK)
    scores = await call.score(compared)
    if isinstance(body, TextsRequest):
        ranked = [RankedText(index, scores[index]) for index in best_first(scores)]
        if body.return_text:
            for text in ranked:
                text.text = msgspec.Raw(compared.repeated[text.index])
        return Response(encode(ranked), media_type="application/json")
    results = [Ranked(index, scores[index]) for index in best_first(scores)[: body.top_n or None]]
    if compared.repeated:
        for one in results:
            one.document = RankedDocument(msgspec.Raw(compared.repeated[one.index]))
    ranking = Ranking(
        id=call.id,
        model=call.model,
        usage=call.usage(),
        cache_diagnosis=call.cache_diagnosis,
        results=results,
    )
    return json_response(ranking)
