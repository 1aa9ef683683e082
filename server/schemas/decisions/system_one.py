"""The body and the answer of POST /v1/systemone, as TypeSafe's System One API has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from server.errors import BadRequest
from server.requests.decisions import MOST_QUESTIONS, Option, Question, predicate
from server.schemas.body import Bounds
from server.schemas.decisions.question_forms import DecidingBody, QuestionForm, as_text, checked

MOST_LEVELS = 10

Described = str | dict[str, Any] | list[Any]
"""A text, or an object or a list, which is read as JSON."""


class NoulForm(QuestionForm):
    instructions: Described | None = None
    criteria: dict[Literal["true", "false"], Described | None] | None = None

    def question(self, name: str | None) -> Question:
        yes, no = ((self.criteria or {}).get(side) or "" for side in ("true", "false"))
        if not (self.instructions or yes or no):
            raise BadRequest("give `instructions`, or `criteria` for true or false.")
        return predicate(name, as_text(self.instructions or ""), as_text(yes), as_text(no))


class ChoiceForm(QuestionForm):
    instructions: Described
    criteria: dict[str, Described | None]

    def question(self, name: str | None) -> Question:
        options = [Option(as_text(value), as_text(each or "")) for value, each in self.criteria.items()]
        return Question("choice", name, as_text(self.instructions), checked(options, "options"))


class ScoreForm(QuestionForm):
    instructions: Described
    criteria: list[Described]

    def question(self, name: str | None) -> Question:
        levels = [Option(as_text(each)) for each in self.criteria]
        return Question("score", name, as_text(self.instructions), checked(levels, "levels", MOST_LEVELS))


class SystemOneRequest(DecidingBody):
    """Asks questions about a state, each of which is answered with probabilities."""

    bounds: ClassVar[Bounds] = {"questions": (MOST_QUESTIONS, "questions")}
    stand_ins = {"state": "-", "questions": {"q": {"type": "noul", "instructions": "-"}}}
    state_field = "state"
    forms = {"noul": NoulForm, "choice": ChoiceForm, "score": ScoreForm}

    state: Annotated[Described, Field(description="The text to decide about; objects and lists are JSON.")]
    questions: dict[str, dict[str, Any]] = Field(
        description=f"1 to {MOST_QUESTIONS} by name: noul (yes or no), choice with `criteria` by option, or "
        f"score with 2 to {MOST_LEVELS} levels in `criteria`, from the lowest to the highest."
    )

    def given(self) -> Iterator[tuple[str, str | None, Any]]:
        for name, each in self.questions.items():
            yield f"questions.{name[:64]}", as_text(name), each

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": as_text(self.state)}]


class SystemOneUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int = 0


class NoulAnswer(msgspec.Struct, tag="noul"):
    noul: float


class ChoiceAnswer(msgspec.Struct, tag="choice"):
    choice: str
    confidence: float
    probabilities: dict[str, float]


class ScoreAnswer(msgspec.Struct, tag="score"):
    score: float
    confidence: float
    legend: dict[str, str]
    probabilities: dict[str, float]


class SystemOne(msgspec.Struct):
    """The answer to each question, by name."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: SystemOneUsage
    x_decided_by: str | None
    """How the model decides, as its card in /v1/models says."""
