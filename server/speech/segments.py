"""The segments of a piece: tokens between timestamps, and where the next piece begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.speech.vocabulary import SpeechTokens

FRAMES_OF_EACH = 2
"""The frames from one timestamp to the next."""


class Span(NamedTuple):
    """A segment as the model has written it. Times are in frames from the piece's beginning."""

    start: int
    end: int
    tokens: list[int]
    """The timestamps among them."""


def cut_spans(tokens: Sequence[int], frames: int, known: SpeechTokens) -> tuple[list[Span], int]:
    """The segments of a piece of so many frames, and the frame from which the next one is read.

    `tokens` are without the end. Where two timestamps meet, a segment was closed. What comes behind the last
    such place is read again with the next piece, unless a single timestamp says that nothing follows. If no
    segment was closed, the whole is one.
    """
    first = known.first_timestamp
    stamped = [token >= first for token in tokens]
    ends = [at + 1 for at in range(len(tokens) - 1) if stamped[at] and stamped[at + 1]]
    if not ends:
        last = next((token for token in reversed(tokens) if token >= first), first)
        end = (last - first) * FRAMES_OF_EACH if last > first else frames
        return [Span(0, min(end, frames), list(tokens))], frames
    whole = stamped[-2:] == [False, True]
    if whole:
        ends.append(len(tokens))
    spans = [
        Span(
            (tokens[begin] - first) * FRAMES_OF_EACH,
            (tokens[end - 1] - first) * FRAMES_OF_EACH,
            list(tokens[begin:end]),
        )
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
    return spans, frames if whole else min(frames, spans[-1].end) or frames


class CertainText:
    """Finds the text tokens of a piece that will stay, while its tokens come."""

    def __init__(self, known: SpeechTokens) -> None:
        self._known = known
        self._held: list[int] = []
        self._closed = False
        """Whether a segment was closed. The first one stays, closed or not."""
        self._last_stamped = False

    def push(self, token: int) -> list[int]:
        """Text tokens that are certain now."""
        stamped = token >= self._known.first_timestamp
        closes = stamped and self._last_stamped
        self._closed = self._closed or closes
        self._last_stamped = stamped
        if self._known.is_text(token):
            self._held.append(token)
        if closes or not self._closed:
            found, self._held = self._held, []
            return found
        return []

    def end(self) -> list[int]:
        """The text tokens that are certain at the end: held ones, if a single timestamp has closed them."""
        return self._held if self._last_stamped else []
