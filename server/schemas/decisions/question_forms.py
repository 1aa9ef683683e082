"""What the APIs for decisions have in common: texts that may be JSON, and checks of questions and options."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from pydantic import ValidationError, ValidationInfo

from server.errors import BadRequest
from server.requests.decisions import MOST_OPTIONS, Option, Question
from server.schemas.body import Body, check_text
from server.schemas.sampling_fields import RequestTerms


class DecidingBody(Protocol):
    """A body that asks questions about a text or a conversation."""

    state_field: ClassVar[str]
    """The name of the field with the text or the conversation."""

    @property
    def terms(self) -> RequestTerms: ...

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The text or the conversation, as chat completions has it."""
        ...

    @property
    def asked(self) -> list[Question]: ...


def place_of(field: str, name: object) -> str:
    """What an error calls the question of this name, or number, in a field."""
    return f"{field}[{name}]" if isinstance(name, int) else f"{field}.{str(name)[:64]}"


def read_form(form: type[Body], value: Any, where: str, info: ValidationInfo | None = None) -> Any:
    """Validates a question; an error names it as `where`."""
    try:
        return form.model_validate(value, context=None if info is None else info.context)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inside = ".".join(map(str, first["loc"]))
        raise BadRequest(": ".join(filter(None, [where, inside, first["msg"]])), where) from None
    except BadRequest as error:
        raise BadRequest(f"{where}: {error.message}", where) from None


def as_text(value: object) -> str:
    """A text; or the lines of a list of texts, or any other value as JSON."""
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return check_text("\n".join(value))
    return check_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def check_options(where: str, options: Sequence[Option], word: str, most: int = MOST_OPTIONS) -> None:
    """Refuses too few or too many options, or two of one name and type."""
    if not 2 <= len(options) <= most:
        raise BadRequest(f"{where}: give 2 to {most} {word}, got {len(options)}.", where)
    [(value, count)] = Counter((type(each.value), each.value) for each in options).most_common(1)
    if count > 1:
        raise BadRequest(f"{where}: {count} of the {word} are {value[1]!r}; name each once.", where)


def check_names(field: str, questions: Sequence[Question], most: int) -> None:
    """Refuses too many questions, none, or two of one name."""
    if not 1 <= len(questions) <= most:
        raise BadRequest(f"`{field}` takes 1 to {most} questions, got {len(questions)}.", field)
    names = Counter(question.name for question in questions if question.name is not None)
    for name, count in names.most_common(1):
        if count > 1:
            raise BadRequest(
                f"`{field}`: {count} questions have the name {name[:64]!r}; name each once.", field
            )


def first_type(value: object, known: Mapping[str, type[Body]], where: str) -> type[Body]:
    """The form of a question by its type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in known:
        shown = repr(kind[:64]) if isinstance(kind, str) else "none"
        raise BadRequest(f"{where}: questions have the type {' or '.join(known)}, got {shown}.", where)
    return known[kind]
