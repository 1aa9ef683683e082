"""The times of a request: how its wall time divides, and what the engine reported about its sequences.

HTTP routes and `LLM` share the arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from engine_core.engine_stats import Timing
from engine_core.protocol import Pooled, Tokens

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class EngineTimes:
    """The engine's part of a request's time, in seconds.

    A request may have several sequences. The queued, prefill and decode times are those of the sequence that
    ended last, because times that pass at once cannot be added. Compute time, steps and preemptions are sums.
    """

    queued_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    compute_time: float = 0.0
    """The seconds that the request cost the engine: of steps that it shares with others, its share."""
    steps: int = 0
    """The number of steps in which tokens of its sequences were computed."""
    preemptions: int = 0
    expected: float | None = None
    """The seconds from its arrival in which the engine expected the first token, or all vectors."""

    def add(self, timing: Timing) -> None:
        """Take the times of a sequence that has ended now, after all that were added before."""
        self.queued_time, self.prefill_time, self.decode_time = timing.queued, timing.prefill, timing.decode
        self._add_cost(timing)

    def add_round(self, answers: Sequence[Pooled | Tokens]) -> None:
        """Take the times of texts that were sent at once. What a request sends in turn adds up."""
        last, latest, expected = None, -1.0, -1.0
        for answer in answers:
            if answer.expected is not None and answer.expected > expected:
                expected = answer.expected
            timing = answer.timing
            if timing is None:
                continue
            self._add_cost(timing)
            ended = timing.queued + timing.prefill + timing.decode
            if ended > latest:
                last, latest = timing, ended
        if last is not None:
            self.queued_time += last.queued
            self.prefill_time += last.prefill
            self.decode_time += last.decode
        if expected >= 0.0:
            self.expected = (self.expected or 0.0) + expected

    def _add_cost(self, timing: Timing) -> None:
        self.compute_time += timing.compute
        self.steps += timing.steps
        self.preemptions += timing.preemptions


class TimingReport(msgspec.Struct, kw_only=True):
    """The wall time of a request in milliseconds: the first five parts add up to the total.

    Where a request has several choices or texts, queue, prefill and decode are the times of the one that
    ended last; compute, steps and preemptions are sums over all.
    """

    tokenize_ms: float
    """The time from the request's head to handing the tokens over: the body, the template, tokenizing."""
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    """The time from the first token to the last; with a stop string to the token that completed it."""
    answer_ms: float
    """The rest: the ways between processes, making text of tokens, writing the answer."""
    total_ms: float
    """The time from the request's head to this report, which is made when the answer is written."""
    compute_ms: float
    """What the request cost the engine: of steps that it shared with others, its share."""
    steps: int
    preemptions: int
    cached_tokens: int
    expected_first_token_ms: float | None
    """The time to the first token, or to all vectors, that the engine expected when the request arrived."""


_SERVER_TIMING = b", ".join(
    name + b";dur=%.3f"
    for name in (b"tokenize", b"queue", b"prefill", b"decode", b"answer", b"compute", b"total")
)
"""The header Server-Timing, with a place for each of the durations of a request."""


class RequestTimes(EngineTimes):
    """The times of one HTTP request, from the moment at which its head is read."""

    __slots__ = ("_submitted", "cached_tokens", "started")

    def __init__(self) -> None:
        super().__init__()
        self.started = time.monotonic()
        """When the head of the request was read, on the monotonic clock."""
        self._submitted = 0.0
        self.cached_tokens = 0
        """The tokens of its prompts that were found in the prefix cache so far."""

    @property
    def first_token(self) -> float:
        """The seconds from the request's head to the first token, or the vectors, of the last sequence."""
        return self._submitted - self.started + self.queued_time + self.prefill_time

    def submit(self) -> None:
        """Note that the engine gets the request's tokens now; of several times the first counts."""
        self._submitted = self._submitted or time.monotonic()

    def report(self) -> TimingReport:
        """How the time until now divides."""
        return TimingReport(
            **{f"{name}_ms": duration for name, duration in self._durations().items()},
            steps=self.steps,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
            expected_first_token_ms=None if self.expected is None else round(1000 * self.expected, 3),
        )

    def headers(self) -> RawHeaders:
        """The headers of a whole answer; there are none if the engine was not asked."""
        if not self._submitted:
            return []
        told: RawHeaders = [(b"server-timing", _SERVER_TIMING % tuple(self._durations().values()))]
        if self.expected is not None:
            told += self.expected_header()
        return told

    def named_headers(self) -> RawHeaders:
        """A header for each time that the engine has reported, and for the cached tokens."""
        if not self.steps:
            return []
        return [
            (b"x-facet-queue-ms", b"%.3f" % (1000 * self.queued_time)),
            (b"x-facet-prefill-ms", b"%.3f" % (1000 * self.prefill_time)),
            (b"x-facet-decode-ms", b"%.3f" % (1000 * self.decode_time)),
            (b"x-facet-cached-tokens", b"%d" % self.cached_tokens),
        ]

    def expected_header(self) -> RawHeaders:
        """The header that tells when the first token is expected, if the engine has said so."""
        if self.expected is None:
            return []
        return [(b"x-facet-expected-first-token-ms", b"%.1f" % (1000 * self.expected))]

    def _durations(self) -> dict[str, float]:
        """The five parts of the time until now, what was computed, and the sum of the parts, in milliseconds.

        They are whole numbers of microseconds, so that the parts add up to the last digit.
        """
        total = round(1e6 * (time.monotonic() - self.started))
        tokenize = round(1e6 * (self._submitted - self.started)) if self._submitted else total
        queue, prefill = round(1e6 * self.queued_time), round(1e6 * self.prefill_time)
        decode = round(1e6 * self.decode_time)
        return {
            "tokenize": tokenize / 1000,
            "queue": queue / 1000,
            "prefill": prefill / 1000,
            "decode": decode / 1000,
            "answer": (total - tokenize - queue - prefill - decode) / 1000,
            "compute": round(1000 * self.compute_time, 3),
            "total": total / 1000,
        }


def sent_later(answer: Pooled, seconds: float) -> Pooled:
    """The answer to a text that waited here for so long, with times that begin before the wait."""
    timing, expected = answer.timing, answer.expected
    return replace(
        answer,
        timing=None if timing is None else replace(timing, queued=timing.queued + seconds),
        expected=None if expected is None else expected + seconds,
    )
