"""Entities of labels that a request names: words and labels as the model reads them, and what it found.

A text is divided into words. All labels, each behind a token of its own, and the words are one sequence; the
model answers with logits, of which the likeliest pieces of the text are chosen that do not overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from models.pooling.entity_files import EntityFacts
from server.errors import BadRequest, invalid
from server.model_facts import Facts, no_task
from server.requests.pooling import TEXTS_AT_ONCE, PooledText, Span
from server.requests.prompt_length import check_text_tokens
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling

MOST_LABELS = 128
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
"""A word as the library gliner divides texts."""

Floats = NDArray[np.float32]


class Entity(msgspec.Struct, frozen=True, gc=False):
    start: int
    """The first character, and the one behind the last:"""
    end: int
    text: str
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class EntityOptions:
    """The options of a search for entities: the threshold, and whether entities may overlap."""

    threshold: float
    """The probability that a score must be above."""
    flat: bool
    """Whether entities may not lie in each other."""
    multi_label: bool
    """Whether the same piece of the text may have several labels."""


def read_entity_texts(
    texts: Sequence[str], labels: Sequence[str], facts: Facts, tokenizer: Tokenizer, *, cut: bool
) -> tuple[list[PooledText], list[list[Span]]]:
    """The items of the texts that have words, and for each text the characters of its words.

    `cut` shortens a text to as many words as the model was trained for, which else is refused.
    """
    about = facts.pooling.entities
    if about is None:
        raise no_task("ner", facts.tasks)
    _check_labels(labels, about)
    before = [part for label in labels for part in (about.ent_token, label)] + [about.sep_token]
    words = [_words(text, index, about, cut=cut) for index, text in enumerate(texts)]
    items: list[PooledText] = []
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        own = range(first, min(first + TEXTS_AT_ONCE, len(texts)))
        written = [before + [texts[at][slice(*span)] for span in words[at]] for at in own if words[at]]
        encoded = iter(tokenizer.encode_words(written))
        for index in own:
            if words[index]:
                item, words[index] = _item(*next(encoded), len(labels), words[index], about)
                check_text_tokens(item.tokens, "input", index, facts)  # type: ignore[arg-type]  # a list
                items += [item] if words[index] else []
    return items, words


def _check_labels(labels: Sequence[str], about: EntityFacts) -> None:
    for label in labels:
        if about.ent_token in label or about.sep_token in label or not label.strip():
            raise BadRequest(
                f"The label {label[:64]!r} is empty, or has a token in it that stands between labels.",
                "labels",
            )
    if len(set(labels)) < len(labels):
        raise BadRequest("`labels` must differ from each other.", "labels")


def _words(text: str, index: int, about: EntityFacts, *, cut: bool) -> list[Span]:
    found = [match.span() for match in islice(_WORD.finditer(text), about.max_len + 1)]
    if len(found) > about.max_len and not cut:
        raise invalid(
            "input",
            f"This model finds entities among up to {about.max_len} words, and input {index} has more. "
            "Divide it, or have it cut by `truncate`.",
            len(text),
        )
    return found[: about.max_len]


def _item(
    ids: list[int], words: list[int | None], labels: int, spans: list[Span], about: EntityFacts
) -> tuple[PooledText, list[Span]]:
    """The item of a text, and the characters of those words that have tokens."""
    places: dict[int, Span] = {}
    for at, word in enumerate(words):
        if word is not None:
            places[word] = places.get(word, (at, at))[0], at + 1
    beyond = 0 if about.embed_ent_token else 1
    asked = [(places[2 * index][0] + beyond, places[2 * index][0] + beyond + 1) for index in range(labels)]
    first = 2 * labels + 1
    kept = [index for index in range(len(spans)) if first + index in places]
    of_words = [places[first + index] for index in kept]
    params = Pooling(task="ner", spans=(*asked, *of_words), labels=labels)
    return PooledText(ids, params), [spans[index] for index in kept]


def find_entities(
    logits: Floats,
    text: str,
    words: Sequence[Span],
    labels: Sequence[str],
    asked: EntityOptions,
    facts: Facts,
) -> list[Entity]:
    """The entities of a text by what the model answered, in the order of the text."""
    about = facts.pooling.entities
    assert about is not None
    probs = 1 / (1 + np.exp(-logits.astype(np.float64)))
    if about.span_mode == "token_level":
        found = _from_ends(probs.reshape(len(words), len(labels), 3), asked.threshold)
    else:
        found = _from_pieces(probs, len(words), asked.threshold)
    chosen = [
        Entity(words[first][0], words[last][1], text[words[first][0] : words[last][1]], labels[label], score)
        for first, last, label, score in _choose(found, asked)
    ]
    return sorted(chosen, key=lambda entity: (entity.start, -entity.score))


_Found = tuple[int, int, int, float]
"""The first and the last word, the label and the score."""


def _from_pieces(probs: NDArray[np.float64], words: int, threshold: float) -> Iterator[_Found]:
    """What is above the threshold among pieces [pieces, labels]: first those of one word, then of two, ..."""
    widths = [words - wider for wider in range(words)]
    ends = np.cumsum(widths)
    for row, label in np.argwhere(probs > threshold).tolist():
        wider = int(np.searchsorted(ends, row, side="right"))
        first = row - int(ends[wider]) + widths[wider]
        yield first, first + wider, label, float(probs[row, label])


def _from_ends(probs: NDArray[np.float64], threshold: float) -> Iterator[_Found]:
    """Pieces from a likely beginning to a likely end, all of whose words are likely: [words, labels, 3]."""
    for label in range(probs.shape[1]):
        begins, ends, inside = probs[:, label].T
        for first in np.flatnonzero(begins > threshold).tolist():
            lowest = np.minimum.accumulate(inside[first:])
            for further in np.flatnonzero((ends[first:] > threshold) & (lowest >= threshold)).tolist():
                score = min(lowest[further], begins[first], ends[first + further])
                yield first, first + further, label, float(score)


def _choose(found: Iterator[_Found], asked: EntityOptions) -> Iterator[_Found]:
    """The likeliest pieces first, each with its label or labels; none overlaps with an earlier one."""
    pieces = [
        sorted(own, key=lambda one: -one[3]) for _, own in groupby(sorted(found), key=lambda one: one[:2])
    ]
    taken = _Taken(flat=asked.flat)
    for own in sorted(pieces, key=lambda own: -own[0][3]):
        if taken.add(*own[0][:2]):
            yield from own if asked.multi_label else own[:1]


class _Taken:
    """The pieces that were chosen."""

    def __init__(self, *, flat: bool) -> None:
        self._flat = flat
        self._words = 0  # a bit for each word that is in one
        self._ends: dict[int, int] = {}  # by the first word, a bit for each last one

    def add(self, first: int, last: int) -> bool:
        """Choose a piece, unless one that was chosen overlaps with it or, if both may be, crosses it."""
        own = ((1 << (last - first + 1)) - 1) << first
        if self._words & own and (self._flat or self._crosses(first, last)):
            return False
        self._words |= own
        self._ends[first] = self._ends.get(first, 0) | 1 << last
        return True

    def _crosses(self, first: int, last: int) -> bool:
        within = ((1 << last) - 1) >> first << first  # the last word of one that began before and ends inside
        return any(
            (begin < first and ends & within) or (first < begin <= last and ends >> (last + 1))
            for begin, ends in self._ends.items()
        )
