"""POST /ner: entities of labels that the request names."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from server.frontend.asks.pooling import PooledAnswer
from server.http.endpoint import Endpoint
from server.requests.labels.entities import find_entities
from server.requests.vectors import as_array
from server.routes.answering import ask, maybe_in_thread
from server.routes.pooling import list_of, pool_texts
from server.schemas.score_and_rerank import Entities, EntitiesRequest

router = APIRouter(route_class=Endpoint, tags=["Embeddings and classification"])

_FEW = 1 << 14
"""So many numbers of the model are looked through in the event loop; more of them in a thread."""


@router.post("/ner")
async def create_entities(body: EntitiesRequest, request: Request) -> Response:
    """Find entities of the given labels in each text."""
    answer = await ask(request, body, body.terms, "ner-", pool_texts)
    is_long = sum([as_array(one).size for one in answer.vectors]) > _FEW
    return await maybe_in_thread(partial(write_entities, body, answer), is_long)


def write_entities(body: EntitiesRequest, answer: PooledAnswer) -> Response:
    """Writes the entities of each text; there are none in a text without words."""
    texts, facts = answer.texts, answer.head.facts
    logits = map(as_array, answer.vectors)
    found: list[Entities] = []
    for index, (written, words) in enumerate(zip(texts.repeated, texts.spans, strict=True)):
        text: str = msgspec.json.decode(written, type=str)
        own = find_entities(next(logits), text, words, body.labels, body.options, facts) if words else []
        found.append(Entities(index=index, entities=own))
    return list_of(answer, found)
