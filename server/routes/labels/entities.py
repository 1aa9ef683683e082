"""POST /ner: entities of labels that the request names."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from server.http.endpoint import Endpoint
from server.reading.body_table import ReadTexts
from server.requests.labels.entities import find_entities
from server.requests.vectors import as_array
from server.routes.pooling_call import PoolingCall, maybe_in_thread
from server.routes.request_context import read_texts
from server.schemas.scores import Entities, EntitiesRequest

router = APIRouter(route_class=Endpoint, tags=["pool"])

_FEW = 1 << 14
"""So many numbers of the model are looked through in the event loop; more of them in a thread."""


@router.post("/ner")
async def create_entities(body: EntitiesRequest, request: Request) -> Response:
    """Find entities of the given labels in each text."""
    call = PoolingCall(request, body, "ner-")
    found: ReadTexts = await read_texts(request, body)
    texts = [msgspec.json.decode(text, type=str) for text in found.repeated]
    arrays = [as_array(one) for one in await call.run(found.items)] if found.items else []

    def entries() -> list[Entities]:
        logits = iter(arrays)
        return [
            Entities(
                index=index,
                entities=find_entities(next(logits), text, words, body.labels, body.options, call.facts)
                if words
                else [],
            )
            for index, (text, words) in enumerate(zip(texts, found.spans, strict=True))
        ]

    is_long = sum(array.size for array in arrays) > _FEW
    return call.answer(await maybe_in_thread(entries, is_long))
