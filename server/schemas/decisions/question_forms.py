"""What bodies that ask typed questions have in common: how questions are read, and named in errors."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr, ValidationError, ValidationInfo, model_validator

from server.errors import BadRequest
from server.requests.decisions import MOST_OPTIONS, MOST_QUESTIONS, Option, Question
from server.schemas.body import MEANINGLESS, Body, check_text
from server.schemas.sampling_fields import RequestBody


class QuestionForm(Body):
    """A question of one type."""

    type: str

    @abstractmethod
    def question(self, name: str | None) -> Question:
        """The question as a model is asked it. Raises BadRequest."""


class DecidingBody(RequestBody):
    """A body that asks questions about a text or a conversation."""

    meaningless = MEANINGLESS | {"seed"}
    state_field: ClassVar[str]
    """The name of the field with the text or the conversation."""
    forms: ClassVar[Mapping[str, type[QuestionForm]]]
    """The form of a question by its type."""
    _asked: list[Question] = PrivateAttr(default_factory=list)

    @abstractmethod
    def given(self) -> Iterator[tuple[str, str | None, Any]]:
        """Yields each question as it was sent, behind what errors call it, and its name."""

    @property
    @abstractmethod
    def messages(self) -> list[dict[str, Any]]:
        """The text or the conversation, as chat completions has it."""

    @property
    def asked(self) -> list[Question]:
        return self._asked

    @model_validator(mode="after")
    def read_questions(self, info: ValidationInfo) -> Self:
        self._asked = [self._read(*each, info.context) for each in self.given()]
        if not 1 <= len(self._asked) <= MOST_QUESTIONS:
            raise BadRequest(
                f"`questions` takes 1 to {MOST_QUESTIONS} questions, got {len(self._asked)}.", "questions"
            )
        names = Counter(question.name for question in self._asked if question.name is not None)
        for name, count in names.most_common(1):
            if count > 1:
                said = f"`questions`: {count} questions have the name {name[:64]!r}; name each once."
                raise BadRequest(said, "questions")
        return self

    def _read(self, place: str, name: str | None, value: Any, notes: Any) -> Question:
        where = f"{place} ({name[:64]!r})" if name is not None and name not in place else place
        try:
            kind = value.get("type")
            if not isinstance(kind, str) or kind not in self.forms:
                raise BadRequest(
                    f"questions have the type {' or '.join(self.forms)}, got {str(kind)[:64]!r}."
                )
            return self.forms[kind].model_validate(value, context=notes).question(name)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            inside = ".".join(map(str, first["loc"]))
            raise BadRequest(f"{where}: {inside}: {first['msg']}.", place) from None
        except BadRequest as error:
            raise BadRequest(f"{where}: {error.message}", place) from None


def as_text(value: object) -> str:
    """A text; or the lines of a list of texts, or any other value as JSON."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        value = "\n".join(value)
    is_text = isinstance(value, str)
    return check_text(value if is_text else json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def checked(options: Sequence[Option], word: str, most: int = MOST_OPTIONS) -> list[Option]:
    """The options, of which there must be two or more, with a value each."""
    if not 2 <= len(options) <= most:
        raise BadRequest(f"give 2 to {most} {word}, got {len(options)}.")
    [((_, value), count)] = Counter((type(each.value), each.value) for each in options).most_common(1)
    if count > 1:
        raise BadRequest(f"{count} of the {word} are {value!r}; name each once.")
    return [*options]
