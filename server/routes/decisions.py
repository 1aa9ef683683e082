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
from server.schemas.conversations.responses import InputTokensDetails, OutputTokensDetails
from server.schemas.decisions.openai_decisions import (
    Answered,
    Decision,
    DecisionRequest,
    DecisionUsage,
    Weighed,
)
from server.schemas.decisions.system_one import (
    ChoiceAnswer,
    NoulAnswer,
    ScoreAnswer,
    SystemOne,
    SystemOneAnswer,
    SystemOneRequest,
    SystemOneUsage,
)

router = APIRouter(route_class=Endpoint, tags=["decide"])


def decide(read: ReadDecisions, terms: Terms, config: ServerConfig) -> Decide:
    """What both APIs ask for."""
    return Decide(terms=terms, read=read)


@router.post("/v1/decisions")
async def create_decision(body: DecisionRequest, request: Request) -> Response:
    """Answer typed questions about an input, each with probabilities."""
    return json_response(write_decision(await ask(request, body, body.terms, "dec-", decide)))


def write_decision(answer: DecidedAnswer) -> Decision:
    """The answer in OpenAI's form, in which a question may be refused alone."""
    counts = answer.end.counts
    written = [
        Answered(type="refusal", name=question.name)
        if found.refusal
        else _answered(question, found.probabilities)
        for question, found in zip(answer.questions, answer.found, strict=True)
    ]
    usage = DecisionUsage(
        counts.prompt, InputTokensDetails(counts.cached), 0, OutputTokensDetails(0), counts.prompt
    )
    return Decision(answer.head.model, written, usage)


def _answered(question: Question, found: list[float]) -> Answered:
    options, name = question.options, question.name
    if question.kind == "predicate":
        return Answered(type="predicate", name=name, probability=found[0])
    if question.kind == "score":
        levels = [
            Weighed(at, each, option.text)
            for at, (option, each) in enumerate(zip(options, found, strict=True))
        ]
        confidence = score_confidence(found)
        return Answered(
            type="score", name=name, score=expectation(found), confidence=confidence, probabilities=levels
        )
    return Answered(
        type="choice",
        name=name,
        choice=options[found.index(max(found))].value,
        confidence=choice_confidence(found),
        probabilities=[Weighed(option.value, each) for option, each in zip(options, found, strict=True)],
    )


@router.post("/v1/systemone")
async def decide_system_one(body: SystemOneRequest, request: Request) -> Response:
    """Answer typed questions about a state by name, each with probabilities, as System One does."""
    return json_response(write_system_one(await ask(request, body, body.terms, "sys1-", decide)))


def write_system_one(answer: DecidedAnswer) -> SystemOne:
    """The answer in TypeSafe's form, which has none for a refusal: then BadRequest is raised."""
    answers: dict[str, SystemOneAnswer] = {}
    for question, found in zip(answer.questions, answer.found, strict=True):
        name = question.name or ""
        if found.refusal:
            raise BadRequest(f"questions.{name[:64]}: {found.refusal}.", f"questions.{name[:64]}")
        answers[name] = _system_one(question, found.probabilities)
    usage = SystemOneUsage(answer.end.counts.prompt)
    return SystemOne(answer.head.model, answers, usage, answer.head.facts.decides_by)


def _system_one(question: Question, found: list[float]) -> SystemOneAnswer:
    texts = [option.text for option in question.options]
    if question.kind == "predicate":
        return NoulAnswer(found[0])
    if question.kind == "choice":
        best = texts[found.index(max(found))]
        return ChoiceAnswer(best, choice_confidence(found), dict(zip(texts, found, strict=True)))
    levels = {str(at): each for at, each in enumerate(found)}
    legend = {str(at): text for at, text in enumerate(texts)}
    return ScoreAnswer(expectation(found), score_confidence(found), legend, levels)
