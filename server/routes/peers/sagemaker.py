"""POST /invocations, where SageMaker asks a container; its GET /ping is another path of /health."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from server.errors import BadRequest
from server.http.connection.body_limits import most_bytes, read_body
from server.http.endpoint import ENTRY, Endpoint
from server.model_facts import GENERATE, POOLING, Facts
from server.routes import chat, completions, pooling
from server.routes.model_choice import forward
from server.routes.request_context import frontend_of
from server.schemas.score_and_rerank import KEYS

router = APIRouter(route_class=Endpoint, tags=["SageMaker"])

_ROUTERS = (chat.router, completions.router, pooling.router, pooling.scores)
_TEXTS = ({"input"}, {"messages"})
_Form = tuple[str, tuple[set[str], ...]]
"""A path, and the fields of which its bodies have one set."""


def _forms(facts: Facts) -> list[_Form]:
    """The bodies that a model answers, in vLLM's order: the first that fits is taken."""
    has, scores = facts.tasks, facts.score_type is not None
    found: list[tuple[bool, _Form]] = [
        (GENERATE in has, ("/v1/chat/completions", ({"messages"},))),
        (GENERATE in has, ("/v1/completions", ({"prompt"}, {"prompt_embeds"}))),
        ("embed" in has, ("/v1/embeddings", _TEXTS)),
        ("classify" in has, ("/classify", _TEXTS)),
        (scores, ("/rerank", ({"query", "documents"},))),
        (scores, ("/score", tuple(map(set, KEYS)))),
        (any(task in POOLING for task in has), ("/pooling", _TEXTS)),
    ]
    return [form for is_there, form in found if is_there]


@router.post("/invocations", dependencies=ENTRY)
async def invoke(request: Request) -> Response:
    """Answer as the endpoint whose fields the body has.

    By vLLM's rule: `messages` as chat completions, `prompt` as completions, `input` as embeddings or
    /classify, `query` and `documents` as /rerank, `text_1` and `text_2` as /score."""
    frontend = frontend_of(request)
    raw = bytes(await read_body(request.receive, most=most_bytes(frontend.media)))
    return await forward(request, raw, _path_for(raw, frontend.facts), _ROUTERS)


def _path_for(raw: bytes, facts: Facts) -> str:
    forms = _forms(facts)
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest("The body should be a JSON object.") from None
    given = {name for name, value in fields.items() if bytes(value) != b"null"}
    for path, ways in forms:
        if any(way <= given for way in ways):
            return path
    ways = "; ".join(
        f"{' or '.join('`' + '` and `'.join(sorted(fields)) + '`' for fields in ways)} ({path})"
        for path, ways in forms
    )
    raise BadRequest(f"This model's bodies have one of these: {ways}.")
