"""The expected time of a step: a line over what it computes, whose coefficients are learned from the steps.

A step reads the weights once, and then takes time for each new token, for each cached position that a token
attends to, for each row that is pooled or sampled, and for each embedding of media that are encoded. It knows
no clock: whoever runs steps hands in how long each one took.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt

from worker.protocol import Pooling, Sampling

STEP, TOKEN, READ, POOLED, PLAIN, FILTERED, LOGPROBS, ENCODED = _TERMS = range(8)
"""The terms of the line: the step itself, new tokens, cached positions read, hidden states pooled,
sampled rows by kind (only a temperature, filters and penalties, logprobs), embeddings of encoded media."""

Work = list[float]
"""The amount of each term in a step, in the order above."""

_OF_TOKEN = (20.0, 1.0, 1e-4, 0.02, 0.2, 1.0, 1.0, 1.0)
"""A first guess of each coefficient, as a multiple of that of a token."""
_UNKNOWN_TOKEN = 1e-4
"""The guess for a token itself, in seconds, if no step was timed at warm-up."""

_DOUBT = (1.0, 1.0, 6.0, 4.0, 4.0, 4.0, 4.0, 6.0)
"""The variance of the logarithm of each first guess. Attention and towers differ most between models."""
_NOISE, _DRIFT = 0.1, 1e-3
"""The variances of the logarithm of a step's time, and of what a coefficient itself changes by in a step."""
_BOUND = 0.3
"""The largest error (of a logarithm) that counts, if the line is sure of itself. Bounded so, the line stays
near the median, and a step during which something else had the processor spoils nothing."""

_UP = 1.1
_DOWN = _UP ** (-1 / 99)
"""A time that grows so after each step that takes longer, and shrinks so after each other one, stays near the
one within which 99 of 100 steps end. One step that stood still for an hour moves it by a tenth."""

_QUANTILE, _MARGIN_RATE = 0.995, 0.05
_FIRST_MARGIN, _MOST_MARGIN = 1.2, 1.6


def sampling_term(params: Sampling | Pooling) -> int:
    """The term under which a row with these parameters is counted when it is sampled or pooled."""
    if isinstance(params, Pooling):
        return POOLED
    if params.logprobs is not None:
        return LOGPROBS
    plain = params.top_p == 1 and not params.top_k and not params.min_p and not params.logit_bias
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    return PLAIN if plain and not penalties and not params.bad_words else FILTERED


class CostLine:
    def __init__(self, timed: Sequence[tuple[int, float]] = ()) -> None:
        """`timed`: the tokens and the seconds of steps that were run at warm-up, with different counts."""
        self.margin = _FIRST_MARGIN
        """The time within which nearly all steps end that fill their bound, as a multiple of the expected."""
        step, token = _first_line(timed)
        self._seconds = [token * multiple for multiple in _OF_TOKEN]
        self._seconds[STEP] = step
        self._doubt = [
            [doubt if term == other else 0.0 for other in _TERMS] for term, doubt in enumerate(_DOUBT)
        ]
        """The covariances of the logarithms of the coefficients."""

    @property
    def step(self) -> float:
        return self._seconds[STEP]

    @property
    def single(self) -> float:
        return self._seconds[STEP] + self._seconds[TOKEN] + self._seconds[PLAIN]

    def tokens(self, count: int, reads: int) -> float:
        """The seconds of so many new tokens, which attend to so many positions in all."""
        return self._seconds[TOKEN] * count + self._seconds[READ] * reads

    def end(self, term: int, count: float) -> float:
        """The seconds of sampling or pooling `count` rows, or encoding embeddings, under this term."""
        return self._seconds[term] * count

    def encoded(self, seconds: float) -> float:
        """The embeddings of media that can be encoded within this time."""
        return seconds / self._seconds[ENCODED]

    def fitting(self, seconds: float, start: int) -> int:
        """The number of tokens from position `start` on that can be computed within this time."""
        token, read = self._seconds[TOKEN] + self._seconds[READ] * start, self._seconds[READ] / 2
        return int(2 * seconds / (token + sqrt(token * token + 4 * read * seconds)))

    def learn(self, work: Work, seconds: float, *, fills: bool) -> None:
        """Correct the line by a step that has run. `fills`: it was to take most of the time that it may.

        Only such steps say how late one can be: what disturbs a machine for milliseconds makes a step of a
        single token twice as long, and one that fills a gap hardly longer.
        """
        parts = [each * amount for each, amount in zip(self._seconds, work, strict=True)]
        expected = sum(parts)
        if expected <= 0 or seconds <= 0:
            return
        ratio, doubt = seconds / expected, self._doubt
        shares = [(term, part / expected) for term, part in enumerate(parts) if part]
        for term, share in shares:
            doubt[term][term] += _DRIFT * share
        # A Kalman filter: an error is put down to the terms that are least known, as far as they took part.
        blame = [sum([row[term] * share for term, share in shares]) for row in doubt]
        variance = sum([blame[term] * share for term, share in shares])
        bound = max(_BOUND, sqrt(variance))
        gain = 1 / (variance + _NOISE)
        correction = gain * min(bound, max(-bound, log(ratio)))
        for term, each in enumerate(blame):
            if each:
                self._seconds[term] *= exp(each * correction)
                part = gain * each
                doubt[term] = [old - part * other for old, other in zip(doubt[term], blame, strict=True)]
        if fills:
            self._learn_margin(ratio)

    def _learn_margin(self, ratio: float) -> None:
        """Move the margin towards the ratio below which that quantile of all steps lies."""
        move = _QUANTILE if ratio > self.margin else _QUANTILE - 1
        self.margin = min(_MOST_MARGIN, max(1.0, self.margin + _MARGIN_RATE * move))


class StepTimes:
    """The 99th percentile of the seconds of steps, by their new tokens in powers of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def usual(self, tokens: int, expected: float) -> float:
        """The seconds within which a step ends of which so many were expected when it was planned."""
        return max(expected, self._seconds.get(tokens.bit_length(), 0.0))

    def learn(self, tokens: int, expected: float, seconds: float) -> None:
        size = tokens.bit_length()
        known = self._seconds.get(size, expected)
        self._seconds[size] = known * (_UP if seconds > known else _DOWN)


def _first_line(timed: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The seconds of a step and of a token, from the quickest steps of the fewest and of the most tokens."""
    if not timed:
        return _UNKNOWN_TOKEN * _OF_TOKEN[STEP], _UNKNOWN_TOKEN
    few, many = min(timed)[0], max(timed)[0]
    quick, slow = (min(seconds for count, seconds in timed if count == tokens) for tokens in (few, many))
    token = (slow - quick) / (many - few) if many > few and slow > quick else quick / _OF_TOKEN[STEP]
    return max(quick - few * token, quick / 10), token
