"""What the holder of a key has used of its quotas, and the headers that tell how much is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, floor

from server.access.keys.key import Key
from server.errors import QuotaExceeded
from server.metrics.server_metrics import KeyCounters

Clock = Callable[[], float]
RawHeaders = list[tuple[bytes, bytes]]

_MINUTE = 60.0


class Bucket:
    """A quota for each minute: it fills steadily, holds a minute's worth at most, and may go into debt."""

    __slots__ = ("_at", "_clock", "_level", "limit")

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    def set_limit(self, limit: int) -> None:
        self._level, self.limit = min(self.level, limit), limit

    @property
    def level(self) -> float:
        """What is left now."""
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / _MINUTE)
        self._at = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """The seconds until so much is there, if nothing is taken meanwhile."""
        return max(0.0, (level - self.level) * _MINUTE / self.limit)


class Account:
    """The quotas of one key, which outlive a change of the file."""

    def __init__(self, key: Key, counters: KeyCounters, clock: Clock = time.monotonic) -> None:
        self.counters = counters
        self._clock = clock
        self._name = key.name
        self._requests = self._tokens = None
        self.update(key)

    def update(self, key: Key) -> None:
        """Take over the limits of the key as the file has them now. What was used stays used."""
        self._requests = self._changed(self._requests, key.requests_per_minute)
        self._tokens = self._changed(self._tokens, key.tokens_per_minute)

    def _changed(self, bucket: Bucket | None, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        if bucket is None:
            return Bucket(limit, self._clock)
        bucket.set_limit(limit)
        return bucket

    @property
    def has_quotas(self) -> bool:
        return self._requests is not None or self._tokens is not None

    def begin_request(self) -> None:
        """Count a request, or raise QuotaExceeded if a quota is used up."""
        requests, tokens = self._requests, self._tokens
        if requests is not None and requests.level < 1:
            raise self._exceeded("requests", requests)
        if tokens is not None and tokens.level < 1:
            raise self._exceeded("tokens", tokens)
        if requests is not None:
            requests.take(1)
        self.counters.requests.inc()

    def _exceeded(self, what: str, bucket: Bucket) -> QuotaExceeded:
        self.counters.refusals.inc()
        return QuotaExceeded(
            f"Rate limit reached for {self._name}: {bucket.limit} {what} per minute. Try again later.",
            what,
            retry_after=max(1, ceil(bucket.seconds_until(1))),
        )

    def read(self, tokens: int) -> None:
        """Count tokens of prompts."""
        self.counters.prompt_tokens.inc(tokens)
        if self._tokens is not None:
            self._tokens.take(tokens)

    def wrote(self, tokens: int) -> None:
        """Count tokens of answers."""
        self.counters.generation_tokens.inc(tokens)
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> RawHeaders:
        """The headers from which OpenAI's clients know what is left of their quotas."""
        found: RawHeaders = []
        for what, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                left = max(0, floor(bucket.level))
                found.append((b"x-ratelimit-limit-" + what, b"%d" % bucket.limit))
                found.append((b"x-ratelimit-remaining-" + what, b"%d" % left))
                found.append((b"x-ratelimit-reset-" + what, _duration(bucket.seconds_until(bucket.limit))))
        return found


def _duration(seconds: float) -> bytes:
    """A duration as OpenAI writes it: 120ms, 7.66s, 1m30s."""
    if seconds < 1:
        return b"%dms" % ceil(1000 * seconds)
    minutes, rest = divmod(seconds, 60)
    if not minutes:
        return f"{rest:.3g}s".encode()
    return b"%dm%ds" % (minutes, ceil(rest))
