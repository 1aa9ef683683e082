"""The times, counts and errors of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request's outcome. Times are in seconds, on one clock."""

    due: float
    """When the request should have gone out; in a closed loop, when it did."""
    ended: float
    inputs: int = 1
    """Texts in the request."""
    input_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = field(default_factory=list[float])
    """When chunks with new tokens came; empty for an answer in one piece."""
    error: str | None = None
    """The kind of error, or None."""
    detail: str = ""
    """The server's message about the error."""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.times[0] - self.due if self.times else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, on average."""
        if not self.times or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def e2el(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.due
