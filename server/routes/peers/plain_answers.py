"""Answers that are a plain object for each choice, as llama.cpp's and SGLang's are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response

from server.frontend.asks.parts import Part
from server.http.sse import JSON, StreamForm, encode
from worker.protocol import TokenLogprobs


@dataclass
class Choice:
    """One choice, as far as it has come, or what is new of it."""

    index: int
    part: Part
    """Its last part, with the counts so far."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class PlainWriter:
    """Writes each choice by a function, whole or as events."""

    write: Callable[[Choice], dict[str, Any]]
    form: StreamForm
    is_list: bool
    """Whether the whole answer is a list."""
    repeats: bool = False
    """Whether an event has all of its choice so far, and not only what is new."""
    closing: bytes = b""
    """The last event."""
    _choices: dict[int, Choice] = field(default_factory=dict)

    def push(self, part: Part) -> bytes:
        self.take([part])
        choice = self._choices[part.choice] if self.repeats else self._choices.pop(part.choice)
        return b"data: " + encode(self.write(choice)) + b"\n\n"

    def last_events(self, end: object) -> bytes:
        return self.closing

    def take(self, parts: list[Part]) -> None:
        for part in parts:
            choice, delta = self._choices.setdefault(part.choice, Choice(part.choice, part)), part.delta
            choice.part, choice.text = part, choice.text + delta.text
            choice.ids += delta.token_ids
            choice.logprobs += delta.logprobs

    @property
    def answer(self) -> Response:
        found = [self.write(choice) for _, choice in sorted(self._choices.items())]
        return Response(encode(found if self.is_list else found[0]), media_type=JSON)
