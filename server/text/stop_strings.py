"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopStrings:
    """Finds the first stop string to be completed, and holds back text only while it may still become one.

    "First" is by the place where it ends, so the outcome does not depend on how the text was cut into pieces;
    among those that end at one place, the first given wins.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: list[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, looking: bool = True) -> tuple[str, str | None]:
        """Returns the text that may be shown, and the stop string that ended it."""
        buffer = self._held + text
        if looking and (found := self._find(buffer)):
            end, stop = found
            self._held = ""
            return buffer[: end if self._include else end - len(stop)], stop
        keep = self._undecided(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        """The match that ends first, among those that end in the new text, as its end and the stop string."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = at + len(stop), stop
        return best

    def _undecided(self, buffer: str) -> int:
        """The length of the longest end of the buffer that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while at >= 0 and len(buffer) - at > longest:
                if stop.startswith(buffer[at:]):
                    longest = len(buffer) - at
                at = buffer.find(stop[0], at + 1)
        return longest
