"""What the holder of a key has used of its quotas, and the headers that tell how much is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, floor

from server.access.keys.key_file import Key
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
        self._buckets: dict[str, Bucket] = {}
        """What is left of the quotas of `requests` and of `tokens` that the key has."""
        self.update(key)

    def update(self, key: Key) -> None:
        """Take over the limits of the key as the file has them now. What was used stays used."""
        known, self._buckets = self._buckets, {}
        for what, limit in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if limit is not None:
                self._buckets[what] = known.get(what) or Bucket(limit, self._clock)
                self._buckets[what].set_limit(limit)

    @property
    def has_quotas(self) -> bool:
        return bool(self._buckets)

    def begin_request(self) -> None:
        """Count a request, or raise QuotaExceeded if a quota is used up."""
        for what, bucket in self._buckets.items():
            if bucket.level < 1:
                raise self._exceeded(what, bucket)
        self._take("requests", 1)
        self.counters.requests.inc()

    def _take(self, what: str, amount: int) -> None:
        if what in self._buckets:
            self._buckets[what].take(amount)

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
        self._take("tokens", tokens)

    def wrote(self, tokens: int) -> None:
        """Count tokens of answers."""
        self.counters.generation_tokens.inc(tokens)
        self._take("tokens", tokens)

    def headers(self) -> RawHeaders:
        """The headers from which OpenAI's clients know what is left of their quotas."""
        found: RawHeaders = []
        for name, bucket in self._buckets.items():
            what, left = name.encode(), max(0, floor(bucket.level))
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
