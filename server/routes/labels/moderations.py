"""POST /v1/moderations: what a served classifier says of texts, in OpenAI's categories."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from server.errors import BadRequest
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.model_facts import Facts
from server.requests.labels.moderation import Table, judge, table_for
from server.requests.vectors import as_array
from server.routes.answering import ask
from server.routes.pooling import pool_texts
from server.routes.request_context import frontend_of
from server.schemas.moderations import ModerationRequest, Moderations

router = APIRouter(route_class=Endpoint, tags=["Embeddings and classification"])

_SERVE = (
    "serve a classifier of harmful texts, such as unitary/toxic-bert, or one whose labels "
    "--moderation-categories explains."
)


async def require_moderation(request: Request) -> None:
    """Refuses every request if the model is no classifier whose labels are known."""
    facts = frontend_of(request).facts
    if "classify" not in facts.tasks:
        raise BadRequest(
            f"The model {facts.model_names[0]} does not classify, so it cannot moderate: {_SERVE}"
        )
    if not _table(request, facts):
        labels = ", ".join(facts.pooling.labels[:8]) or "none with a name"
        raise BadRequest(f"Nobody has said which categories the model's labels mean ({labels}): {_SERVE}")


def _table(request: Request, facts: Facts) -> Table:
    return table_for(facts.pooling.labels, request.scope["app"].state.moderation)


@router.post("/v1/moderations", dependencies=[Depends(require_moderation)])
async def create_moderation(body: ModerationRequest, request: Request) -> Response:
    """Classify each text by categories of harmful content."""
    answer = await ask(request, body, body.terms, "modr-", pool_texts)
    head = answer.head
    labels, table = head.facts.pooling.labels, _table(request, head.facts)
    results = [judge(labels, as_array(one).tolist(), table) for one in answer.vectors]
    return json_response(Moderations(head.id, head.model, results))
