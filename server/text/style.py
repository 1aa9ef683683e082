"""What a request says of the manner of an answer, as the variables that chat templates read."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

import msgspec

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

_SWITCHES = ("enable_thinking", "thinking", "reasoning")
"""The names under which templates ask whether the model shall think."""


class Style(msgspec.Struct, frozen=True, gc=False):
    """None is what the template does by itself."""

    effort: Effort | None = None
    verbosity: Verbosity | None = None
    thinks: bool | None = None
    """Whether the model thinks first, if the client says so itself: no effort at all is no thinking too."""

    budget: int | None = None
    """The most tokens of thinking."""

    def variables(self, read: Set[str]) -> dict[str, object]:
        """The variables to set, of those that a template reads."""
        found: dict[str, object] = {}
        thinks = self.thinks
        if thinks is None and self.effort is not None:
            thinks = self.effort != "none"
        if thinks is not None:
            found.update({name: thinks for name in _SWITCHES if name in read})
        if self.effort is not None and "reasoning_effort" in read:
            found["reasoning_effort"] = self.effort
        if self.verbosity is not None and "verbosity" in read:
            found["verbosity"] = self.verbosity
        if self.budget is not None and "thinking_budget" in read:
            found["thinking_budget"] = self.budget
        return found
