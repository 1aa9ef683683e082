"""The parts of an answer: what a model wrote, read as reasoning, text and tool calls."""

from __future__ import annotations

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the thinking that comes before an answer."""

    text: str


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """A tool call whose name is known. Its arguments follow, then `CallEnded`; calls never interleave."""

    index: int
    """The number of the call in its answer, from 0."""
    name: str
    id: str = ""
    """The id that the model wrote, if its format has one."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call that has begun, as JSON text."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    index: int


Part = Reasoning | Text | CallBegun | Arguments | CallEnded
