"""Counts a stream's tokens and their time."""

from __future__ import annotations

import time
from typing import Any


class Pace:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first = self._last = 0.0
        self._chunks = 0
        self._tokens: int | None = None

    def see(self, chunk: dict[str, Any]) -> None:
        """Counts a chunk of a stream; the one with `usage` says how many tokens there were."""
        if chunk.get("choices"):
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._chunks += 1
        if usage := chunk.get("usage"):
            self._tokens = usage["completion_tokens"]

    def summary(self) -> str:
        if not self._chunks:
            return "no token came"
        count = self._chunks if self._tokens is None else self._tokens
        seconds = self._last - self._first
        rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
        tokens = "1 token" if count == 1 else f"{count} tokens"
        return f"{tokens}{rate}, the first after {self._first - self._started:.2f} s"
