"""Holds answers to the form that a request asks for, and tells the client what of it is not enforced."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fastapi import Response

from engine_core.client.in_flight import AddOptions
from server.answers.answer_format import AnswerFormat
from server.answers.answer_grammar import behind_thinking
from server.errors import BadRequest
from server.frontend.frontend import Frontend
from server.grammars.form_grammar import AnswerGrammar
from server.grammars.structured_params import AskedForm
from server.text.detokenizer import is_mark

_ALIKE = (
    "This model begins calls with a character with which an answer of the form that is asked may begin too, "
    "so that no grammar tells them apart. Ask for one of them: `tool_choice` none for the form, or required."
)


@dataclass(frozen=True, slots=True)
class Form:
    """What the engine holds an answer to."""

    bounds: AddOptions = field(default_factory=AddOptions)
    warnings: Sequence[str] = ()


async def form_of(
    frontend: Frontend,
    asked: AskedForm,
    format: AnswerFormat | None = None,
    prompt: str = "",
    *,
    calls: AnswerGrammar | None = None,
) -> Form:
    """The form that was asked for. Raises the error that refuses it.

    `format` says how the model writes answers behind a conversation that ends in `prompt`: reasoning comes
    before what is bound, and if it may call tools, `calls` may take its place.
    """
    built = await frontend.grammars.check(asked)
    if format is not None:
        built = _behind(built, format, prompt, calls)
    warnings = [f"{asked.field}: not enforced: {', '.join(built.ignored)}"] if built.ignored else []
    return Form({"grammar": built.for_engine()}, warnings)


def _behind(
    built: AnswerGrammar, format: AnswerFormat, prompt: str, calls: AnswerGrammar | None
) -> AnswerGrammar:
    """The form behind reasoning, or calls in its place."""
    if format.thinking is None and calls is None:
        return built
    if calls is not None and _begin_alike(built, format.opener):
        raise BadRequest(_ALIKE, "tools")
    return behind_thinking(built, format, calls, is_open=format.begins_thinking(prompt))


def _begin_alike(built: AnswerGrammar, opener: str) -> bool:
    """Whether an answer may begin with the one character that opens calls. The lexer does not go back."""
    if len(opener) != 1 or is_mark(opener):
        return False
    return opener == "{" or built.kind != "json" or json.loads(built.text).get("type") != "object"


def with_warnings(response: Response, warnings: Iterable[str]) -> Response:
    """The answer, with headers that say what of the request has no effect."""
    for warning in warnings:
        response.headers.append("Warning", f'299 - "{_printable(warning)}"')
    return response


def _printable(text: str) -> str:
    """What a header may hold of a text that a client may have written."""
    return "".join(char if " " <= char <= "~" and char not in '"\\' else "?" for char in text)[:500]
