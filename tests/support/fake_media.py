"""Media items for tests of the engine, and what a worker without tensors makes of them.

An embedding is a number that takes the place of a token, so that a wrong, missing or stale one changes the
text that comes out.
"""

from collections.abc import Mapping
from itertools import count
from zlib import crc32

from engine_core.prompt_media import Media
from engine_core.protocol import AddRequest
from worker.buffers import Buffer
from worker.protocol import MediaPlace, NewSeq, Runs, SeqStep, StepInput
from worker.worker_facts import WorkerFacts

UNKNOWN = -(1 << 40)
"""The token in place of an embedding that no step has read yet."""


def picture(
    hash: bytes, at: int, length: int, runs: Runs | None = None, pixels: bytes | memoryview | None = None
) -> Media:
    """A picture in place of `length` tokens, all of them embeddings unless `runs` says which."""
    pixels = crc32(hash).to_bytes(4, "little")[:3] if pixels is None else pixels
    shape = (1, len(pixels) // 3, 3)
    return Media(hash, "image", at, length, runs or ((0, length),), shape, (1, 1, 1), Buffer(pixels))


def embeddings_of(pixels: Buffer, number: int) -> list[int]:
    """The embeddings of a picture."""
    return [crc32(bytes(pixels.data) + bytes([index])) for index in range(number)]


def seen_tokens(add: AddRequest) -> list[int]:
    """The tokens of a request with the embeddings of its media in their places."""
    tokens = list(add.tokens)
    for media in add.media:
        rows = iter(embeddings_of(media.pixels, media.embeddings))
        for first, length in media.runs:
            for position in range(media.at + first, media.at + first + length):
                tokens[position] = next(rows)
    return tokens


class FakeMedia:
    """Holds the embeddings of a worker without tensors, and checks that steps read only what is there."""

    def __init__(self, facts: WorkerFacts) -> None:
        self._facts = facts
        self.whole = facts.whole_media
        self._rows: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}
        """The layers that are still to be computed of some of these."""
        self._places: dict[int, tuple[MediaPlace, ...]] = {}

    def begin(self, new: NewSeq) -> list[int]:
        """Note that a sequence enters its slot; returns its tokens, those of embeddings unknown."""
        self._places[new.slot] = new.media
        tokens = list(new.tokens)
        for place in new.media:
            for position, _ in _positions(place):
                tokens[position] = UNKNOWN
        return tokens

    def follow(self, step: StepInput, tokens: Mapping[int, list[int]]) -> None:
        """Forget and encode what a step says, and put what its rows read among their tokens."""
        if step.fresh:
            self._rows.clear()
            self._left.clear()
        for number in step.forget:
            del self._rows[number]
            self._left.pop(number, None)
        for each in step.encode:
            if each.number in self._rows:
                raise ValueError("an item is encoded that is there")
            self._rows[each.number] = embeddings_of(each.pixels, each.embeddings)
            if each.number in step.partly:
                self._left[each.number] = self._facts.tower_layers
        for number, layers in step.partly.items():
            if not 0 < layers <= self._left[number]:
                raise ValueError(f"{layers} of {self._left[number]} layers are to be computed")
            self._left[number] -= layers
            if not self._left[number]:
                del self._left[number]
        if len(self._left) > 1:
            raise ValueError("several items are encoded partly")
        if sum(map(len, self._rows.values())) > self._facts.held_embeddings:
            raise ValueError("there are too many embeddings")
        for seq in step.seqs:
            for place in self._places[seq.slot]:
                self._read(seq, place, tokens[seq.slot])

    def _read(self, seq: SeqStep, place: MediaPlace, tokens: list[int]) -> None:
        start, stop, end = seq.start, seq.start + seq.count, place.at + place.length
        if start >= end or stop <= place.at:
            return
        if self.whole and stop < end:
            raise ValueError("an item is cut")
        if place.number in self._left:
            raise ValueError("an item is read of which layers are to be computed")
        rows = self._rows[place.number]  # or it was never encoded, or is forgotten
        for position, row in _positions(place):
            if start <= position < stop:
                tokens[position] = rows[row]


def _positions(place: MediaPlace) -> list[tuple[int, int]]:
    """The positions of an item's embeddings, each with the number of its embedding."""
    rows = count()
    return [
        (position, next(rows))
        for first, length in place.runs
        for position in range(place.at + first, place.at + first + length)
    ]
