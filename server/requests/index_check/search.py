"""Finds which way of reading and pooling texts made the vectors of an index.

A generator, so that the same search runs over the server's engine and over a server that a command has
started: it yields token ids of texts, is sent the hidden states of each, and returns what it has found.
Each way of reading is computed once for a text; all poolings, modules and cuts are tried on what came.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from models.pooling.config import PoolingConfig
from server.requests.index_check.given_vectors import Given
from server.requests.index_check.pooled_vectors import Floats, Poolings, normalized, stacked
from server.text.tokenizer import Tokenizer

Search = Generator[list[list[int]], list[Floats], "Found"]

FEW, SAME = 8, 0.999
"""The texts on which other ways of reading are tried, and the nearness of vectors that were made alike."""
SAME_BITS = 0.97
"""The part of bits that agree where vectors were made alike."""
_USUAL_LIMITS = (64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)

PROMPTS = (
    "query: ",
    "passage: ",
    "search_query: ",
    "search_document: ",
    "classification: ",
    "clustering: ",
    "Represent this sentence for searching relevant passages: ",
    "task: search result | query: ",
    "title: none | text: ",
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
)
"""Instructions that well-known models were trained with."""
CHANGES: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    "in small letters": str.lower,
    "with spaces for line breaks": lambda text: text.replace("\n", " "),
    "without spaces at its ends": str.strip,
}


@dataclass(frozen=True, slots=True)
class TextReading:
    """A way in which texts become tokens."""

    prompt: str = ""
    keep: int = 0
    """The tokens to which a text is cut."""
    special: bool = True
    change: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint that may have made the vectors."""

    name: str
    tokenizer: Tokenizer
    pooling: PoolingConfig
    poolings: Poolings
    max_len: int
    """The most tokens of a text that can be computed."""
    prompts: tuple[str, ...] = ()
    """Instructions to try beside the model's own and those of well-known ones."""
    usual_mode: str = "MEAN"

    @property
    def usual(self) -> TextReading:
        """How the checkpoint's files say that texts are read."""
        texts = self.pooling.texts
        prompt = texts.prompts.get(texts.default_prompt_name or "", "")
        return TextReading(prompt, min(texts.max_len or self.max_len, self.max_len))

    def encode(self, reading: TextReading, texts: Sequence[str]) -> list[list[int]]:
        texts_of = self.pooling.texts
        written = [f"{reading.prompt}{CHANGES[reading.change](text)}{texts_of.suffix}" for text in texts]
        if texts_of.lower_case:
            written = [text.lower() for text in written]
        return self.tokenizer.encode_many(written, reading.special and not texts_of.has_special, reading.keep)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to make vectors, and how near those of each sample come to it."""

    reading: TextReading
    mode: str
    steps: int
    """The modules that follow pooling."""
    near: Floats
    made: Floats
    """The vectors [N, W] before they are normalized."""

    @property
    def score(self) -> float:
        """What decides between candidates: the mean, so that a few long texts count."""
        return float(np.mean(self.near))


@dataclass
class Found:
    """What a search has found."""

    model: Model
    given: Given
    best: Candidate
    usual: Candidate
    """What the checkpoint's files say."""
    unknown: list[str] = field(default_factory=list[str])
    """A sentence on each choice that these samples cannot tell."""

    @property
    def least(self) -> float:
        return SAME_BITS if self.given.are_bits(self.best.made.shape[1]) else SAME

    @property
    def matches(self) -> bool:
        return float(np.median(self.best.near)) >= self.least


def search(model: Model, given: Given) -> Search:
    everything = range(len(given.texts))
    candidates = yield from _tried(model, given, model.usual, everything)
    usual = _usual_of(model, candidates)
    best = _best(candidates, model)
    if float(np.min(best.near)) < _least(given, best):
        reading = yield from _other_reading(model, given, best)
        if reading != model.usual:
            candidates = yield from _tried(model, given, reading, everything)
            best = max(best, _best(candidates, model), key=lambda one: one.score)
    found = Found(model, given, best, usual)
    if found.matches:
        found.unknown += _unknown_pooling(candidates, best)
        found.unknown += _unknown_limit(model, given, best.reading)
    return found


def _other_reading(
    model: Model, given: Given, usual: Candidate
) -> Generator[list[list[int]], list[Floats], TextReading]:
    """The reading that comes nearest: its choices are tried one after the other, twice."""
    reading = usual.reading
    by_length = sorted(range(len(given.texts)), key=lambda index: len(given.texts[index]))
    spread = [by_length[round(i * (len(by_length) - 1) / (FEW - 1))] for i in range(FEW)]
    few = list(dict.fromkeys(spread))
    for _ in range(2):
        before = reading
        for members, readings in (
            (by_length[-FEW // 2 :], _limits(model, given, reading)),
            (few, _prompts(model, reading)),
            (few, [replace(reading, special=not reading.special)]),
            (few, [replace(reading, change=change) for change in CHANGES if change != reading.change]),
        ):
            reading = yield from _nearest(model, given, [reading, *readings], members)
        if reading == before:
            break
    return reading


def _nearest(
    model: Model, given: Given, readings: Sequence[TextReading], members: Sequence[int]
) -> Generator[list[list[int]], list[Floats], TextReading]:
    """The best of these readings; of those that make the same tokens of all these texts, the first."""
    known: dict[str, TextReading] = {}
    for reading in readings:
        known.setdefault(repr(model.encode(reading, [given.texts[i] for i in members])), reading)
    if len(known) == 1:
        return readings[0]
    scored: list[tuple[float, TextReading]] = []
    for reading in known.values():
        candidates = yield from _tried(model, given, reading, members)
        scored.append((_best(candidates, model).score, reading))
    return max(scored, key=lambda one: one[0])[1]


def _limits(model: Model, given: Given, reading: TextReading) -> list[TextReading]:
    return [replace(reading, keep=keep) for keep in limits_of(model) if keep != reading.keep]


def limits_of(model: Model) -> list[int]:
    """The lengths in tokens at which texts may have been cut."""
    own = {model.max_len, model.usual.keep}
    return sorted({*own, *(limit for limit in _USUAL_LIMITS if limit < model.max_len)})


def _prompts(model: Model, reading: TextReading) -> list[TextReading]:
    prompts = ["", *model.prompts, *model.pooling.texts.prompts.values(), *PROMPTS]
    return [replace(reading, prompt=prompt) for prompt in dict.fromkeys(prompts) if prompt != reading.prompt]


def _tried(
    model: Model, given: Given, reading: TextReading, members: Sequence[int]
) -> Generator[list[list[int]], list[Floats], list[Candidate]]:
    """All ways to pool what is read in one way, of some of the samples."""
    ids = model.encode(reading, [given.texts[i] for i in members])
    states = yield ids
    special = model.tokenizer.special_ids
    merged = [
        model.poolings.merge(one, _special_ends(tokens, special))
        for one, tokens in zip(states, ids, strict=True)
    ]
    found: list[Candidate] = []
    for mode, rows in stacked(merged).items():
        for steps in range(len(model.poolings.steps) + 1):
            made = model.poolings.after(rows, steps)
            if made is not None:
                found.append(Candidate(reading, mode, steps, given.nearness(made, members), made))
    return found


def _special_ends(tokens: Sequence[int], special: frozenset[int]) -> tuple[int, int]:
    first = next((i for i, token in enumerate(tokens) if token not in special), len(tokens))
    last = next((i for i, token in enumerate(reversed(tokens)) if token not in special), 0)
    return first, last if first < len(tokens) else 0


def _usual_of(model: Model, candidates: Sequence[Candidate]) -> Candidate:
    mode = "+".join(model.pooling.modes) or model.usual_mode
    same = [one for one in candidates if one.mode == mode] or list(candidates)
    return max(same, key=lambda one: one.steps)


def _best(candidates: Sequence[Candidate], model: Model) -> Candidate:
    """The nearest candidate; of those that are equally near, what the checkpoint's files say."""
    usual = _usual_of(model, candidates)
    best = max(candidates, key=lambda one: one.score)
    return usual if usual.score >= best.score - 1e-6 else best


def _least(given: Given, best: Candidate) -> float:
    return SAME_BITS if given.are_bits(best.made.shape[1]) else SAME


def _unknown_pooling(candidates: Sequence[Candidate], best: Candidate) -> list[str]:
    """Ways of pooling that come as near, though their vectors may point elsewhere in other texts."""
    far = 4 * (1 - best.score) + 1e-6
    alike = {
        one.mode
        for one in candidates
        if one.mode != best.mode and one.steps == best.steps and 1 - one.score <= far
    } - {"MEAN_SQRT_LEN" if best.mode == "MEAN" else "MEAN" if best.mode == "MEAN_SQRT_LEN" else ""}
    if not alike:
        return []
    return [f"these texts cannot tell {best.mode} from {', '.join(sorted(alike))}: give longer ones"]


def _unknown_limit(model: Model, given: Given, reading: TextReading) -> list[str]:
    """What cannot be told of cuts, because no text is long enough."""
    whole = model.encode(replace(reading, keep=1 << 30), given.texts)
    longest = max(map(len, whole))
    fits = [limit for limit in limits_of(model) if limit >= longest]
    if len(fits) < 2:
        return []
    return [
        f"whether texts were cut at {', '.join(map(str, fits))} tokens or not at all cannot be told: the "
        f"longest has {longest}; give some of more than {fits[0]}"
    ]


def lengths_of(found: Found) -> str:
    """What lengths of vectors say: normalized, raw, cut (behind being normalized), scaled, or unknown."""
    lengths, made = found.given.lengths, found.best.made
    width = found.given.width
    if lengths is None:
        return "unknown"

    def near(expected: Floats) -> bool:
        return bool(np.allclose(lengths, expected, rtol=0.01))

    if near(np.ones(len(lengths), np.float32)):
        return "normalized"
    if near(np.linalg.norm(made[:, :width], axis=1)):
        return "raw"
    return "cut" if near(np.linalg.norm(normalized(made)[:, :width], axis=1)) else "scaled"
