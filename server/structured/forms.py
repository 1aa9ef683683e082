"""Holds answers to the form that a request asks for, and tells the client what of it is not enforced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fastapi import Response

from engine_core.client.add_options import AddOptions
from server.answers.finding import AnswerFormat
from server.frontend import Frontend
from server.grammars import as_grammar
from server.structured.building import Built
from server.structured.params import Asked
from server.structured.thinking import Markers, behind_thinking


@dataclass(frozen=True, slots=True)
class Form:
    """What the engine holds an answer to."""

    bounds: AddOptions = field(default_factory=AddOptions)
    warnings: Sequence[str] = ()


async def form_of(
    frontend: Frontend,
    asked: Asked,
    format: AnswerFormat | None = None,
    prompt: str = "",
    *,
    calls: bool = False,
) -> Form:
    """The form that was asked for. Raises the error that refuses it.

    `format` says how the model writes answers behind a conversation that ends in `prompt`: reasoning comes
    before what is bound, and if it may call tools, `calls` may take its place.
    """
    built = await frontend.grammars.prove(asked)
    if format is not None:
        built = _behind(built, format, prompt, calls=calls)
    warnings = [f"{asked.field}: not enforced: {', '.join(built.ignored)}"] if built.ignored else []
    return Form({"grammar": as_grammar(built)}, warnings)


def _behind(built: Built, format: AnswerFormat, prompt: str, *, calls: bool) -> Built:
    """The form behind reasoning, or calls in its place, as far as special tokens tell these apart."""
    thinking, tokens = format.thinking, {mark: id for id, mark in format.marks.items()}
    opener = format.opener if calls and format.opener[:1] in tokens else ""
    if thinking is None and not opener:
        return built
    markers = Markers(
        opens=thinking.opens if thinking else (),
        closes=thinking.closes if thinking else (),
        tokens=tokens,
        is_open=format.begins_thinking(prompt),
        calls=opener,
    )
    return behind_thinking(built, markers)


def with_warnings(response: Response, warnings: Iterable[str]) -> Response:
    """The answer, with headers that say what of the request has no effect."""
    for warning in warnings:
        response.headers.append("Warning", f'299 - "{_printable(warning)}"')
    return response


def _printable(text: str) -> str:
    """What a header may hold of a text that a client may have written."""
    return "".join(char if " " <= char <= "~" and char not in '"\\' else "?" for char in text)[:500]
