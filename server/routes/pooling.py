"""POST /pooling runs any pooling task of the model for each text; POST /classify its classification."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from server.access.client_identity import require_right
from server.api.pooling_bodies import Classification, ClassifyRequest, PoolingData, PoolingRequest
from server.http.endpoint import Endpoint
from server.model_facts import Facts
from server.reading.readings import CLASSIFY, POOLING
from server.requests.vectors import as_array
from server.routes.embeddings import bytes_response, check_encoding, written
from server.routes.generation import frontend_of, respond
from server.routes.pooling_call import CLASSIFIES, POOLS, PoolingCall
from server.routes.read import read
from worker.protocol import Vectors

router = APIRouter(route_class=Endpoint, tags=["pool"])


@router.post("/pooling", dependencies=POOLS)
async def pool(body: PoolingRequest, request: Request) -> Response:
    """Vectors, or labels, for each text or for each of its tokens."""
    call = PoolingCall(request, body.terms(frontend_of(request).facts), "pooling-")

    async def work() -> Response:
        items = await read(request, body, POOLING)
        require_right(request, items[0].params.task)
        check_encoding(body, call, len(items))
        vectors = await call.run(items)
        if body.encoding_format in ("bytes", "bytes_only"):
            return await bytes_response(call, body, vectors)
        return call.answer(PoolingData(index=i, data=written(one, body)) for i, one in enumerate(vectors))

    return await respond(request, work())


@router.post("/classify", dependencies=CLASSIFIES)
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """The probability of each label, and the likeliest of them."""
    call = PoolingCall(request, body.terms(frontend_of(request).facts), "classify-")

    async def work() -> Response:
        vectors = await call.run(await read(request, body, CLASSIFY))
        return call.answer(_classification(i, one, call.facts) for i, one in enumerate(vectors))

    return await respond(request, work())


def _classification(index: int, vectors: Vectors, facts: Facts) -> Classification:
    probs = as_array(vectors)
    return Classification(
        index=index,
        label=label_of(int(np.argmax(probs)), facts),
        probs=probs.tolist(),
        num_classes=len(probs),
    )


def label_of(index: int, facts: Facts) -> str | None:
    """The name of a label; None if the model's files do not name its labels."""
    labels = facts.pooling.labels
    return labels[index] if labels else None
