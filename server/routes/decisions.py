"""Typed questions about a text, answered with probabilities: POST /v1/decisions as OpenAI has it, and
/v1/systemone as TypeSafe does."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.errors import BadRequest
from server.frontend.asks.deciding import Decide, DecidedAnswer
from server.frontend.asks.parts import Terms
from server.http.endpoint import Endpoint
from server.http.sse import json_response
from server.options.server_flags import ServerConfig
from server.reading.decisions import ReadDecisions
from server.requests.decisions import Question, choice_confidence, expectation, score_confidence
from server.routes.answering import ask
from server.schemas.decisions.openai_decisions import (
    DecisionRequest,
    write_decision,
)
from server.schemas.decisions.system_one import (
    ChoiceAnswer,
    NoulAnswer,
    ScoreAnswer,
    SystemOne,
    SystemOneRequest,
    SystemOneUsage,
)

router = APIRouter(route_class=Endpoint, tags=["Decisions"])


def decide(read: ReadDecisions, terms: Terms, config: ServerConfig) -> Decide:
    """What both APIs ask for."""
    return Decide(terms=terms, read=read)


@router.post("/v1/decisions")
async def create_decision(body: DecisionRequest, request: Request) -> Response:
    """Answer typed questions about an input, each with probabilities."""
    answer = await ask(request, body, body.terms, "dec-", decide)
    counts = answer.end.counts
    return json_response(write_decision(answer.head.model, answer.decided, counts.prompt, counts.cached))


@router.post("/v1/systemone")
async def decide_system_one(body: SystemOneRequest, request: Request) -> Response:
    """Answer typed questions about a state by name, each with probabilities, as System One does."""
    return json_response(write_system_one(await ask(request, body, body.terms, "sys1-", decide)))


def write_system_one(answer: DecidedAnswer) -> SystemOne:
    """The answer in TypeSafe's form, which has none for a refusal: then BadRequest is raised."""
    for index, reason in answer.refusals.items():
        place = f"questions.{answer.decided[index][0].name}"
        raise BadRequest(f"{place[:80]}: {reason}.", place[:80])
    answers = {question.name or "": _answered(question, found) for question, found in answer.decided}
    usage = SystemOneUsage(answer.end.counts.prompt)
    return SystemOne(answer.head.model, answers, usage, answer.head.facts.decides_by)


def _answered(question: Question, found: list[float]) -> NoulAnswer | ChoiceAnswer | ScoreAnswer:
    texts = [option.text for option in question.options]
    if question.kind == "predicate":
        return NoulAnswer(found[0])
    if question.kind == "choice":
        best = texts[found.index(max(found))]
        return ChoiceAnswer(best, choice_confidence(found), dict(zip(texts, found, strict=True)))
    legend = {str(at): each for at, each in enumerate(texts)}
    levels = {str(at): each for at, each in enumerate(found)}
    return ScoreAnswer(expectation(found), score_confidence(found), legend, levels)
