"""Answers that are a plain object for each choice, as llama.cpp's and SGLang's are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from msgspec.structs import replace

from server.frontend.asks.parts import Part
from server.frontend.text_output import Delta
from server.http.sse import JSON, StreamForm, encode


@dataclass
class PlainWriter:
    """Writes each choice by a function of a part of it, or of all its parts as one."""

    write: Callable[[Part], dict[str, Any]]
    form: StreamForm
    is_list: bool
    """Whether the whole answer is a list."""
    repeats: bool = False
    """Whether an event has all of its choice so far, and not only what is new."""
    is_empty: bool = False
    """Whether no tokens were asked for. The engine makes one for each request, which is not shown then."""
    closing: bytes = b""
    """The last event."""
    _choices: dict[int, Part] = field(default_factory=dict)

    def push(self, part: Part) -> bytes:
        self.take([part])
        known = self._choices[part.choice] if self.repeats else self._choices.pop(part.choice)
        return b"data: " + encode(self.write(known)) + b"\n\n"

    def last_events(self, end: object) -> bytes:
        return self.closing

    def take(self, parts: list[Part]) -> None:
        for part in parts:
            if self.is_empty:
                ended = None if part.delta.finish_reason is None else "length"
                part = replace(part, delta=Delta(part.delta.index, finish_reason=ended))
            if (known := self._choices.get(part.choice)) is not None:
                before, delta = known.delta, part.delta
                ids, logprobs = before.token_ids + delta.token_ids, before.logprobs + delta.logprobs
                delta = replace(delta, text=before.text + delta.text, token_ids=ids, logprobs=logprobs)
                part = replace(part, delta=delta)
            self._choices[part.choice] = part

    @property
    def answer(self) -> Response:
        found = [self.write(part) for _, part in sorted(self._choices.items())]
        return Response(encode(found if self.is_list else found[0]), media_type=JSON)
