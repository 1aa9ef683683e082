"""What a frontend can be asked, and what it gives: asks, and the answers to them while they come."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

R_co = TypeVar("R_co", covariant=True)


class Ask(Protocol[R_co]):
    """What the engine is asked for: one of the kinds in this folder."""

    def open(self, frontend: Any, /) -> Awaitable[R_co]:
        """Checks and admits the request, and returns its answer while it comes. A frontend calls this."""
        ...
