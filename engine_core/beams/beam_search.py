"""Beam search: the answers that are followed, those that have ended, and the best of all.

Each answer that is followed goes on with its likeliest tokens, twice as many as there are answers; of all
these the likeliest are followed. One with a stop token has ended, and competes by its score with all that end
later. A search is over if no answer that is followed can have a better score than those that have ended.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine_core.beams.beam_params import Beam, BeamParams
from worker.protocol import TokenLogprobs


@dataclass(slots=True, eq=False)
class LiveBeam:
    """An answer that is followed: its tokens, and where its cache entries lie."""

    slot: int
    tables: list[list[int]]
    """Its cache blocks, a table for each group of layers."""
    source: int
    """The slot of the answer from which it goes on; its own, unless another answer goes on there."""
    copied: list[int] = field(default_factory=list[int])
    """The blocks of each group, partly filled, that it needs a copy of before its next token."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    total: float = 0.0
    is_planned: bool = False
    """Whether a step computes what may follow its last token, or has."""
    found: TokenLogprobs | None = None
    """What may follow its last token, once that step has landed."""


class Continuation(NamedTuple):
    """An answer, and a token with which it may go on."""

    beam: LiveBeam
    token: int
    total: float


class BeamSearch:
    """The search of one request. It begins when the prompt is computed."""

    def __init__(self, params: BeamParams, stops: Collection[int], prompt_len: int, limit: int) -> None:
        """`limit`: the number of tokens, the prompt's included, at which answers end."""
        self.width = params.width
        self.beams: list[LiveBeam] = []
        """The answers that are followed, the likeliest first; none while the prompt is computed."""
        self.spare_slots: list[int] = []
        """Slots of this request that no answer needs now."""
        self._params = params
        self._stops = frozenset(stops)
        self._prompt_len, self._limit = prompt_len, limit
        self._ended: list[tuple[float, Beam]] = []
        """The scores of the best answers that have ended, and these answers, the best one first."""

    def begin(self, slot: int, tables: list[list[int]]) -> None:
        """Follow the empty answer behind the prompt, which lies in this slot."""
        self.beams = [LiveBeam(slot, tables, slot, is_planned=True)]

    def restart(self) -> None:
        """Forget all answers: what was computed for them is lost."""
        self.beams, self._ended = [], []

    @property
    def waits(self) -> bool:
        """Whether it is not known yet what may follow some answer."""
        return any(beam.found is None for beam in self.beams)

    @property
    def lacks_rows(self) -> bool:
        """Whether an answer is in no step yet."""
        return not all(beam.is_planned for beam in self.beams)

    def choose(self) -> list[Continuation]:
        """The likeliest continuations of all answers, the likeliest first. Those with stop tokens end."""
        found: list[Continuation] = []
        for beam in self.beams:
            if (entry := beam.found) is None:
                raise RuntimeError("an answer of a beam search has not landed")
            likeliest = slice(1, 1 + self._params.candidates)
            for token, value in zip(entry.ids[likeliest], entry.values[likeliest], strict=True):
                continuation = Continuation(beam, token, beam.total + value)
                if token in self._stops:
                    self._end(continuation, "stop")
                else:
                    found.append(continuation)
        found.sort(key=_total, reverse=True)
        return found[: self.width]

    def is_over(self, following: list[Continuation]) -> bool:
        """Whether these continuations can change nothing about what the search finds, or are at the limit."""
        if not following or self._prompt_len + len(following[0].beam.tokens) + 1 >= self._limit:
            return True
        if len(self._ended) < self.width:
            return False
        # Logprobs are not above 0, so an answer gets a better score only by its length.
        next_length = self._prompt_len + len(following[0].beam.tokens) + 1  # as it counts with a stop token
        best = max(self._score(following[0].total, length) for length in (next_length, self._limit))
        return self._params.early_stopping or self._ended[-1][0] >= best

    def end(self, following: list[Continuation]) -> list[Beam]:
        """End the search with these continuations; returns the best of all answers, the best one first."""
        if not (self._params.early_stopping and len(self._ended) == self.width):
            for continuation in following:
                self._end(continuation, "length")
        return [beam for _, beam in self._ended[: self._params.answers]]

    def logprobs_of(self, beam: LiveBeam, token: int) -> list[TokenLogprobs]:
        """The logprobs of an answer that goes on with a token, if they are asked for."""
        count, entry = self._params.logprobs, beam.found
        if count is None or entry is None:
            return []
        rank = entry.ids.index(token, 1)
        stop = len(entry.ids) if count == -1 else 1 + count
        ids, values = [token, *entry.ids[1:stop]], [entry.values[rank], *entry.values[1:stop]]
        return [*beam.logprobs, TokenLogprobs(ids, values, rank)]

    def _score(self, total: float, length: int) -> float:
        return total / length**self._params.length_penalty

    def _end(self, continuation: Continuation, finish: Literal["stop", "length"]) -> None:
        """Keep an answer that ends if it is among the best. A stop token does not count for its length."""
        beam, token, total = continuation
        count = len(beam.tokens) + (finish == "length")
        score = self._score(total, self._prompt_len + count)
        if len(self._ended) == self.width and score <= self._ended[-1][0]:
            return
        answer = Beam([*beam.tokens, token], total, finish, self.logprobs_of(beam, token))
        insort(self._ended, (score, answer), key=_falling)
        del self._ended[self.width :]


def _total(continuation: Continuation) -> float:
    return continuation.total


def _falling(ended: tuple[float, Beam]) -> float:
    return -ended[0]
