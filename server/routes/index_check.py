"""POST /index_check: whether the served model has made the vectors of somebody's index, and in which way."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from server.access.client_identity import require_right
from server.api.fields import FIRST_ERROR, Text, optional
from server.api.pooling_bodies import PoolingBody
from server.errors import BadRequest
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.model_facts import require_task
from server.requests.index_check.given_vectors import MOST_SAMPLES, read_given
from server.requests.index_check.pooled_vectors import Floats, read_poolings
from server.requests.index_check.report import make_report
from server.requests.index_check.search import Found, Model, Search, search
from server.requests.pooling import Item
from server.requests.vectors import as_array
from server.routes.pooling_call import POOLS, PoolingCall
from server.routes.request_context import cancelled_when_client_leaves
from worker.protocol import Pooling

router = APIRouter(route_class=Endpoint, tags=["pool"])


class Sample(PoolingBody):
    text: Text
    vector: list[float] | str = Field(description="Numbers, or base64 of little-endian float32.")


class IndexCheckRequest(PoolingBody):
    bounds = {"samples": (MOST_SAMPLES, "samples"), "prompts": (MOST_SAMPLES, "texts")}

    samples: Annotated[list[Sample], FIRST_ERROR] = Field(
        description="Texts and their vectors, best 32 of different lengths."
    )
    prompts: list[Text] | None = optional("Instructions that may stand before the texts.")


@router.post("/index_check", dependencies=POOLS)
@cancelled_when_client_leaves
async def check_index(body: IndexCheckRequest, request: Request) -> Response:
    """Find in which way the model has made these vectors, if it has."""
    require_right(request, "token_embed")
    call = PoolingCall(request, body, "check-")
    facts, frontend = call.facts, call.frontend
    require_task("token_embed", facts.tasks)
    if facts.pooling.steps:
        raise BadRequest(
            "This model has modules behind its pooling, which its hidden states have passed here. Use `facet "
            "index-check --model`, which looks at them without."
        )
    vectors = [_read_vector(one.vector) for one in body.samples]
    given = read_given([one.text for one in body.samples], vectors)
    made = facts.ready.worker.vectors.get("embed")
    model = Model(
        facts.model_names[0],
        frontend.tokenizer,
        facts.pooling,
        await asyncio.to_thread(read_poolings, frontend.folder, facts.pooling),
        facts.max_text_len,
        tuple(body.prompts or ()),
        "MEAN" if made is None else made.pooling.upper(),
    )
    running, answers = search(model, given), None
    while True:
        step = await asyncio.to_thread(_next_ids, running, answers)
        if isinstance(step, Found):
            return json_response(make_report(step))
        asked = Pooling(task="token_embed", use_activation=False)
        answers = [as_array(one) for one in await call.run([Item(ids, asked) for ids in step])]


def _next_ids(running: Search, answers: list[Floats] | None) -> list[list[int]] | Found:
    try:
        return next(running) if answers is None else running.send(answers)
    except StopIteration as end:
        return end.value


def _read_vector(vector: list[float] | str) -> object:
    if isinstance(vector, list):
        return vector
    try:
        return np.frombuffer(base64.b64decode(vector, validate=True), "<f4")
    except (binascii.Error, ValueError):
        raise BadRequest("A vector is neither a list of numbers nor base64 of float32.", "samples") from None
