"""The body and the answer of POST /v1/decisions, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, Strict

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
from server.schemas.body import FIRST_ERROR, Body, Bounds, Text
from server.schemas.conversations.response_input import InputReader
from server.schemas.conversations.responses import (
    MAX_ITEMS,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)
from server.schemas.conversations.transcript import objects_of, text_or_objects
from server.schemas.decisions.question_forms import DecidingBody, QuestionForm, as_text, checked


class _Asked(QuestionForm):
    name: Text | None = None
    instructions: Text | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The instructions as one text."""
        parts = (
            [self.instructions] if isinstance(self.instructions, str) else map(_text_of, self.instructions)
        )
        return "\n".join(parts)


class PredicateForm(_Asked):
    def question(self, name: str | None) -> Question:
        return predicate(name, self.text)


class _Choice(Body):
    value: Annotated[Text, Strict()] | Annotated[bool, Strict()]
    description: Text = ""


class ChoiceForm(_Asked):
    choices: list[_Choice]

    def question(self, name: str | None) -> Question:
        options = [Option(each.value, each.description) for each in self.choices]
        return Question("choice", name, self.text, checked(options, "choices"))


class _Level(Body):
    label: Text
    description: Text = ""


class ScoreForm(_Asked):
    levels: list[_Level]

    def question(self, name: str | None) -> Question:
        options = [Option(each.label, each.description) for each in self.levels]
        return Question("score", name, self.text, checked(options, "levels"))


def _text_of(part: Mapping[str, Any]) -> str:
    """The text of a part of the instructions."""
    match part:
        case {"type": "input_text", "text": str(text)}:
            return as_text(text)
        case {"type": "input_json", "data": data}:
            return as_text(data)
        case {"type": "input_image"}:
            raise BadRequest("pictures are read in `input`, and not in a question: put it there.")
        case _:
            raise BadRequest("parts of `instructions` are input_text with `text`, or input_json with `data`.")


class DecisionRequest(DecidingBody):
    """Asks questions about an input, each of which is answered with probabilities. It has no streams."""

    bounds: ClassVar[Bounds] = {"input": (MAX_ITEMS, "items"), "questions": (MOST_QUESTIONS, "questions")}
    client_names: ClassVar[Mapping[str, str]] = {"messages": "input"}
    stand_ins = {"input": "-", "questions": [{"type": "predicate", "instructions": "-"}]}
    state_field = "input"
    forms = {"predicate": PredicateForm, "choice": ChoiceForm, "score": ScoreForm}

    input: Annotated[str | list[dict[str, Any]], text_or_objects("input")] = Field(
        description="A text, or items as in /v1/responses: messages with texts, pictures and input_json, "
        "calls and their outputs."
    )
    questions: Annotated[list[dict[str, Any]], FIRST_ERROR] = Field(
        description=f"1 to {MOST_QUESTIONS}, each with `type`, `instructions` and perhaps a `name`: "
        f"predicate, choice with 2 to {MOST_OPTIONS} `choices` (`value`, `description`), or score with "
        "`levels` (`label`, `description`) from the lowest to the highest."
    )

    def given(self) -> Iterator[tuple[str, str | None, Any]]:
        for index, each in enumerate(self.questions):
            name = each.get("name")
            yield f"questions[{index}]", name if isinstance(name, str) else None, each

    @property
    def messages(self) -> list[dict[str, Any]]:
        reader = InputReader()
        if isinstance(self.input, str):
            reader.transcript.say("user", self.input)
        else:
            for index, item in enumerate(self.input):
                reader.read(_without_json(item), f"input[{index}]")
        if not reader.transcript.messages:
            raise BadRequest("`input` holds nothing to decide about.", "input")
        return reader.transcript.messages


def _without_json(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """An item whose parts of JSON are texts."""
    name = "output" if "output" in item else "content"
    if not isinstance(item.get(name), list):
        return item
    parts = [
        {"type": "input_text", "text": as_text(part.get("data"))}
        if part.get("type") == "input_json"
        else part
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


class Decision(msgspec.Struct):
    """The answers, in the order of the questions."""

    model: str
    answers: list[Answered]
    usage: ResponseUsage


def write_decision(
    model: str, decided: Iterable[tuple[Question, list[float]]], tokens: int, cached: int
) -> Decision:
    """The answer, of the probabilities of the options of each question; one without any is refused. `tokens`
    were read, some of them `cached`."""
    usage = ResponseUsage(
        input_tokens=tokens,
        input_tokens_details=InputTokensDetails(cached),
        output_tokens=0,
        output_tokens_details=OutputTokensDetails(0),
        total_tokens=tokens,
    )
    return Decision(model, [_answered(*each) for each in decided], usage)


def _answered(question: Question, found: list[float]) -> Answered:
    options, name = question.options, question.name
    if not found:
        return Answered(type="refusal", name=name)
    if question.kind == "predicate":
        return Answered(type="predicate", name=name, probability=found[0])
    if question.kind == "score":
        levels = [Weighed(at, each, options[at].text) for at, each in enumerate(found)]
        score, confidence = expectation(found), score_confidence(found)
        return Answered(type="score", name=name, score=score, confidence=confidence, probabilities=levels)
    weighed = [Weighed(option.value, each) for option, each in zip(options, found, strict=True)]
    choice, confidence = options[found.index(max(found))].value, choice_confidence(found)
    return Answered(type="choice", name=name, choice=choice, confidence=confidence, probabilities=weighed)
