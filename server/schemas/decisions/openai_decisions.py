"""The body and the answer of POST /v1/decisions, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, PrivateAttr, Strict, ValidationInfo, model_validator

from server.errors import BadRequest
from server.requests.decisions import (
    MOST_OPTIONS,
    MOST_QUESTIONS,
    Option,
    Question,
    choice_confidence,
    expectation,
    predicate,
    score_confidence,
)
from server.schemas.body import FIRST_ERROR, MEANINGLESS, Body, Bounds, Flag, Text
from server.schemas.conversations.response_input import InputReader
from server.schemas.conversations.responses import MAX_ITEMS, InputTokensDetails, OutputTokensDetails
from server.schemas.conversations.transcript import objects_of, text_or_objects
from server.schemas.decisions.question_forms import (
    as_text,
    check_names,
    check_options,
    first_type,
    place_of,
    read_form,
)
from server.schemas.sampling_fields import RequestBody

_JSON, _TEXT = "input_json", "input_text"


class _Asked(Body):
    """What questions of all types have."""

    type: str
    name: Text | None = None
    instructions: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The instructions as one text."""
        if isinstance(self.instructions, str):
            return as_text(self.instructions)
        return "\n".join(_part_text(part) for part in self.instructions)


class _Choice(Body):
    value: Annotated[Text, Strict()] | Flag
    description: Text = ""


class _Level(Body):
    label: Text
    description: Text = ""


class PredicateForm(_Asked):
    def question(self, where: str) -> Question:
        return predicate(self.name, self.text)


class ChoiceForm(_Asked):
    choices: list[_Choice]

    def question(self, where: str) -> Question:
        options = [Option(each.value, each.description) for each in self.choices]
        check_options(where, options, "choices")
        return Question("choice", self.name, self.text, options)


class ScoreForm(_Asked):
    levels: list[_Level]

    def question(self, where: str) -> Question:
        options = [Option(each.label, each.description) for each in self.levels]
        check_options(where, options, "levels")
        return Question("score", self.name, self.text, options)


_FORMS: Mapping[str, type[Body]] = {"predicate": PredicateForm, "choice": ChoiceForm, "score": ScoreForm}


def _part_text(part: Mapping[str, Any]) -> str:
    match part:
        case {"type": "input_text", "text": str(text)}:
            return text
        case {"type": "input_json", "data": data}:
            return as_text(data)
        case {"type": "input_image"}:
            raise BadRequest("pictures are read in `input`, and not in a question: put it there.")
        case _:
            raise BadRequest("parts of `instructions` are input_text with `text`, or input_json with `data`.")


class DecisionRequest(RequestBody):
    """Asks questions about an input, each of which is answered with probabilities. It has no streams."""

    meaningless = MEANINGLESS
    bounds: ClassVar[Bounds] = {"input": (MAX_ITEMS, "items"), "questions": (MOST_QUESTIONS, "questions")}
    client_names: ClassVar[Mapping[str, str]] = {"messages": "input"}
    stand_ins = {"input": "-", "questions": [{"type": "predicate", "instructions": "-"}]}
    state_field: ClassVar[str] = "input"

    input: Annotated[str | list[dict[str, Any]], text_or_objects("input")] = Field(
        description="A text, or items as in /v1/responses: messages with texts, pictures and input_json, "
        "calls and their outputs."
    )
    questions: Annotated[list[dict[str, Any]], FIRST_ERROR] = Field(
        description=f"1 to {MOST_QUESTIONS}, each with `type`, `instructions` and perhaps a `name`: "
        f"predicate, choice with 2 to {MOST_OPTIONS} `choices` (`value`, `description`), or score with "
        "`levels` (`label`, `description`) from the lowest to the highest."
    )

    _asked: list[Question] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def check_questions(self, info: ValidationInfo) -> Self:
        questions: list[Question] = []
        for index, each in enumerate(self.questions):
            where = place_of("questions", index)
            if isinstance(name := each.get("name"), str):
                where += f" ({name[:64]!r})"
            form = read_form(first_type(each, _FORMS, where), each, where, info)
            questions.append(_read(form, where))
        check_names("questions", questions, MOST_QUESTIONS)
        self._asked = questions
        return self

    @property
    def asked(self) -> list[Question]:
        return self._asked

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as chat completions has it."""
        reader = InputReader()
        if isinstance(self.input, str):
            reader.transcript.say("user", self.input)
        else:
            for index, item in enumerate(self.input):
                reader.read(_without_json(item), f"input[{index}]")
        if not reader.transcript.messages:
            raise BadRequest("`input` holds nothing to decide about.", "input")
        return reader.transcript.messages


def _read(form: Any, where: str) -> Question:
    try:
        return form.question(where)
    except BadRequest as error:
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        raise BadRequest(message, where) from None


def _without_json(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item whose parts of JSON are texts."""
    name = "output" if "output" in item else "content"
    if not isinstance(item.get(name), list):
        return item
    parts = [
        {"type": _TEXT, "text": as_text(part.get("data"))} if part.get("type") == _JSON else part
        for part in objects_of(item[name], name)
    ]
    return {**item, name: parts}


class Weighed(msgspec.Struct, omit_defaults=True):
    """An option or a level with its probability."""

    value: str | bool | int
    probability: float
    label: str | UnsetType = UNSET


class Answered(msgspec.Struct, kw_only=True):
    """The answer to a question, or that it is refused; fields of the other types are left out."""

    type: Literal["predicate", "choice", "score", "refusal"]
    name: str | None
    probability: float | UnsetType = UNSET
    choice: str | bool | UnsetType = UNSET
    score: float | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    probabilities: list[Weighed] | UnsetType = UNSET


class DecisionUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Decision(msgspec.Struct):
    """The answers, in the order of the questions."""

    model: str
    answers: list[Answered]
    usage: DecisionUsage


class Counted(Protocol):
    """The tokens of a request."""

    @property
    def prompt(self) -> int: ...

    @property
    def cached(self) -> int: ...


def write_decision(model: str, decided: Iterable[tuple[Question, list[float]]], counts: Counted) -> Decision:
    """The answer, of the probabilities of the options of each question; one without any is refused."""
    answers = [
        _answered(question, found) if found else Answered(type="refusal", name=question.name)
        for question, found in decided
    ]
    usage = DecisionUsage(
        counts.prompt, InputTokensDetails(counts.cached), 0, OutputTokensDetails(0), counts.prompt
    )
    return Decision(model, answers, usage)


def _answered(question: Question, found: list[float]) -> Answered:
    options, name = question.options, question.name
    if question.kind == "predicate":
        return Answered(type="predicate", name=name, probability=found[0])
    if question.kind == "score":
        return Answered(
            type="score",
            name=name,
            score=expectation(found),
            confidence=score_confidence(found),
            probabilities=[Weighed(at, each, options[at].text) for at, each in enumerate(found)],
        )
    return Answered(
        type="choice",
        name=name,
        choice=options[found.index(max(found))].value,
        confidence=choice_confidence(found),
        probabilities=[Weighed(option.value, each) for option, each in zip(options, found, strict=True)],
    )
