"""The body and the answer of POST /v1/systemone, as TypeSafe's System One API has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from server.errors import BadRequest
from server.requests.decisions import MOST_QUESTIONS, Option, Question, predicate
from server.schemas.body import MEANINGLESS, Body, Bounds
from server.schemas.decisions.question_forms import (
    as_text,
    check_names,
    check_options,
    first_type,
    place_of,
    read_form,
)
from server.schemas.sampling_fields import RequestBody

MOST_LEVELS = 10

Described = str | dict[str, Any] | list[Any]
"""A text, or an object or a list, which is read as JSON."""


class NoulForm(Body):
    type: str
    instructions: Described | None = None
    criteria: dict[Literal["true", "false"], Described | None] | None = None

    def question(self, name: str, where: str) -> Question:
        criteria = self.criteria or {}
        yes, no = (_described(criteria.get(side)) for side in ("true", "false"))
        if self.instructions is None and not (yes or no):
            raise BadRequest(f"{where}: give `instructions`, or `criteria` for true or false.", where)
        return predicate(name, _described(self.instructions), yes, no)


class ChoiceForm(Body):
    type: str
    instructions: Described
    criteria: dict[str, Described | None]

    def question(self, name: str, where: str) -> Question:
        options = [Option(as_text(value), _described(each)) for value, each in self.criteria.items()]
        check_options(where, options, "options")
        return Question("choice", name, as_text(self.instructions), options)


class ScoreForm(Body):
    type: str
    instructions: Described
    criteria: list[Described]

    def question(self, name: str, where: str) -> Question:
        levels = [as_text(each) for each in self.criteria]
        check_options(where, [Option(f"{at}") for at, _ in enumerate(levels)], "levels", MOST_LEVELS)
        return Question("score", name, as_text(self.instructions), [Option(each) for each in levels])


_FORMS: Mapping[str, type[Body]] = {"noul": NoulForm, "choice": ChoiceForm, "score": ScoreForm}


def _described(value: Described | None) -> str:
    return "" if value is None else as_text(value)


class SystemOneRequest(RequestBody):
    """Asks questions about a state, each of which is answered with probabilities."""

    meaningless = MEANINGLESS | {"seed"}
    bounds: ClassVar[Bounds] = {"questions": (MOST_QUESTIONS, "questions")}
    stand_ins = {"state": "-", "questions": {"q": {"type": "noul", "instructions": "-"}}}
    state_field: ClassVar[str] = "state"

    state: Annotated[Described, Field(description="The text to decide about; objects and lists are JSON.")]
    questions: dict[str, dict[str, Any]] = Field(
        description=f"1 to {MOST_QUESTIONS} by name: noul (yes or no), choice with `criteria` by option, or "
        f"score with 2 to {MOST_LEVELS} levels in `criteria`, from the lowest to the highest."
    )

    _asked: list[Question] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def check_questions(self, info: ValidationInfo) -> Self:
        questions: list[Question] = []
        for name, each in self.questions.items():
            where = place_of("questions", name)
            form = read_form(first_type(each, _FORMS, where), each, where, info)
            questions.append(form.question(as_text(name), where))
        check_names("questions", questions, MOST_QUESTIONS)
        self._asked = questions
        return self

    @property
    def asked(self) -> list[Question]:
        return self._asked

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The state as a message."""
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


SystemOneAnswer = NoulAnswer | ChoiceAnswer | ScoreAnswer


class SystemOne(msgspec.Struct):
    """The answer to each question, by name."""

    model: str
    answers: dict[str, SystemOneAnswer]
    usage: SystemOneUsage
    x_decided_by: str | None
    """How the model decides, as its card in /v1/models says."""
