"""What a caller may say of a request beside its tokens and parameters."""

from __future__ import annotations

from typing import TypedDict

from engine_core.protocol import Grammar, Thinking


class AddOptions(TypedDict, total=False):
    """The optional fields of `Add`, by which a caller says how the engine shall treat a request."""

    priority: int
    owner: str
    weight: float
    max_running: int
    wait: float
    budget: float
    salt: str
    group: int
    streams: bool
    times_each: bool
    diagnoses: bool
    grammar: Grammar
    thinking: Thinking
