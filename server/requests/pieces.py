"""Pieces of texts that get a vector each, and texts that are longer than the model reads.

A text is read once, and each piece is pooled from what its own tokens became there. A text that is too long
is read in windows, if the operator wants it, which know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from server.errors import BadRequest
from server.model_facts import Facts
from server.requests.pooling import Item, Source, TextReader
from server.requests.vectors import as_array
from server.text.tokenizer import unpack
from worker.protocol import Pooling, Vectors

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How texts are cut: by spans, or into pieces of so many tokens, some of which they share."""

    spans: Sequence[Sequence[Span]] | None
    unit: Literal["characters", "tokens"] | None
    size: int = 0
    overlap: int = 0


def cut_items(
    cutting: Cutting, items: Sequence[Item], sources: Sequence[Source], reader: TextReader
) -> tuple[list[Item], list[list[Span]]]:
    """The items with their spans, and the spans of each text as the answer shows them."""
    cut: list[Item] = []
    shown: list[list[Span]] = []
    for index, (item, source) in enumerate(zip(items, sources, strict=True)):
        if item.params.task != "embed" and "embed" not in item.params.outputs:
            raise BadRequest("Pieces of texts have dense vectors, which are not asked for here.", "spans")
        unit = cutting.unit or ("characters" if isinstance(source, str) else "tokens")
        offsets = None
        if unit == "characters":
            if not isinstance(source, str):
                raise BadRequest("Token ids have no characters: spans count tokens here.", "span_unit")
            offsets = _Offsets(source, item, index, reader)
        if cutting.spans is None:
            spans = list(_pieces(item.length, cutting.size, cutting.overlap))
            shown.append(spans if offsets is None else [offsets.characters(span) for span in spans])
        else:
            given = cutting.spans[index]
            spans = [
                _checked(span, item.length, index) if offsets is None else offsets.tokens(span)
                for span in given
            ]
            shown.append(list(given))
        params = msgspec.structs.replace(item.params, spans=tuple(spans))
        cut.append(msgspec.structs.replace(item, params=params))
    return cut, shown


def _pieces(length: int, size: int, overlap: int) -> Iterator[Span]:
    start = 0
    while True:
        stop = min(start + size, length)
        yield start, stop
        if stop == length:
            return
        start = stop - overlap


def _checked(span: Span, length: int, index: int) -> Span:
    if not 0 <= span[0] < span[1] <= length:
        raise BadRequest(
            f"The span {list(span)} of text {index} must have a start below its stop, and lie within its "
            f"{length} tokens.",
            "spans",
        )
    return span


class _Offsets:
    """The places of tokens in their text."""

    def __init__(self, text: str, item: Item, index: int, reader: TextReader) -> None:
        written, shift = reader.written(text)
        offsets = reader.tokenizer.offsets(written, reader.adds_special_to(written))
        if len(offsets) != item.length:
            raise BadRequest(
                f"Text {index} was cut, and spans of characters mean whole texts: let them count tokens, or "
                "do not have it cut.",
                "spans",
            )
        self._text, self._index = text, index
        places = np.asarray(offsets, np.int64).reshape(-1, 2) - shift
        self._starts, self._stops = places[:, 0], places[:, 1]
        self._filled = (self._stops > self._starts) & (self._stops > 0) & (self._starts < len(text))

    def tokens(self, span: Span) -> Span:
        """The tokens that have some of these characters."""
        start, stop = span
        if not 0 <= start < stop <= len(self._text):
            raise BadRequest(
                f"The span {list(span)} of text {self._index} must have a start below its stop, and lie "
                f"within its {len(self._text)} characters.",
                "spans",
            )
        found = np.flatnonzero(self._filled & (self._stops > start) & (self._starts < stop))
        if not len(found):
            raise BadRequest(f"The span {list(span)} of text {self._index} has no token.", "spans")
        return int(found[0]), int(found[-1]) + 1

    def characters(self, span: Span) -> Span:
        """The characters of some tokens; none if all of them are special."""
        own = np.flatnonzero(self._filled[span[0] : span[1]]) + span[0]
        if not len(own):
            return 0, 0
        return max(0, int(self._starts[own].min())), min(len(self._text), int(self._stops[own].max()))


def read_in_windows(items: list[Item], facts: Facts) -> list[Item]:
    """The items; one that is longer than the model reads is its first window, and has the others."""
    most = facts.max_text_len
    return [_divided(item, most, facts) if item.length > most else item for item in items]


def _divided(item: Item, most: int, facts: Facts) -> Item:
    ids, spans = unpack(item.tokens), item.params.spans
    if spans:
        windows = list(_windows_of(spans, most))
        parts = [
            (start, stop, msgspec.structs.replace(item.params, spans=own)) for start, stop, own in windows
        ]
    else:
        parts = [(start, min(start + most, len(ids)), item.params) for start in range(0, len(ids), most)]
        modes = facts.pooling.modes or (("LAST",) if facts.ready.worker.causal else ("CLS",))
        if modes in (("CLS",), ("LAST",)):  # which are in one window
            parts = parts[:1] if modes == ("CLS",) else parts[-1:]
    first, *others = [Item(ids[start:stop], params) for start, stop, params in parts]
    return msgspec.structs.replace(first, windows=others)


def _windows_of(spans: Sequence[Span], most: int) -> Iterator[tuple[int, int, tuple[Span, ...]]]:
    """Windows with all tokens of some spans, each as long as the model reads: its ends, and its own spans."""
    first = 0
    while first < len(spans):
        start = stop = spans[first][0]
        last = first
        while last < len(spans) and start <= spans[last][0] and max(stop, spans[last][1]) - start <= most:
            stop = max(stop, spans[last][1])
            last += 1
        if last == first:
            raise BadRequest(
                f"A piece of {spans[first][1] - spans[first][0]} tokens is longer than the {most} that the "
                "model reads at a time.",
                "spans",
            )
        yield start, stop, tuple((one - start, other - start) for one, other in spans[first:last])
        first = last


def join_windows(item: Item, answers: Sequence[Vectors], facts: Facts) -> Vectors:
    """The answer to a text that was read in windows: the vectors of all pieces, or the mean of the windows',
    in which each weighs as much as it has tokens. It has the length 1 if theirs have."""
    arrays = [as_array(answer) for answer in answers]
    if item.params.spans:
        joined = np.concatenate(arrays)
    else:
        weights = [window.length for window in (item, *item.windows)]
        joined = np.average(np.stack(arrays).astype(np.float64), axis=0, weights=weights)
        length = np.linalg.norm(joined)
        if _normalizes(item.params, facts) and length:
            joined = joined / length
    return Vectors(joined.astype("<f4").tobytes(), joined.shape)


def _normalizes(params: Pooling, facts: Facts) -> bool:
    asked = (params.use_activation, facts.pooling.use_activation, facts.pooling.normalize)
    return next(each for each in asked if each is not None)
