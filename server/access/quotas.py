"""The quotas of keys: requests and tokens for each minute, counted for a key and for each of its models."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil, floor

from server.access.key_file import Key
from server.errors import QuotaExceeded
from server.metrics.optional_metrics import KeyCounters

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

    def __init__(
        self,
        key: Key,
        counters: KeyCounters,
        clock: Clock = time.monotonic,
        model: str = "",
        whole: Account | None = None,
    ) -> None:
        """`whole` is the account of the key, if this one is for a `model` by that name in the key."""
        self.counters = counters
        self._clock = clock
        self._model, self._whole = model, whole
        self._of_models: dict[str, Account] = {}
        self._buckets: dict[str, Bucket] = {}
        """What is left of the quotas of `requests` and of `tokens` that the key has."""
        self.update(key)

    def update(self, key: Key) -> None:
        """Take over the limits of the key as the file has them now. What was used stays used."""
        self._key = key
        known, self._buckets, quotas = self._buckets, {}, key.quotas_of(self._model)
        for what, limit in (("requests", quotas.requests_per_minute), ("tokens", quotas.tokens_per_minute)):
            if limit is not None:
                self._buckets[what] = known.get(what) or Bucket(limit, self._clock)
                self._buckets[what].set_limit(limit)
        for account in self._of_models.values():
            account.update(key)

    def for_model(self, name: str) -> Account:
        """The account for what is asked of a model by its name in the key."""
        if not isinstance(self._key.models, dict):
            return self
        if name not in self._of_models:
            self._of_models[name] = Account(self._key, self.counters, self._clock, name, self)
        return self._of_models[name]

    @property
    def has_quotas(self) -> bool:
        return bool(self._buckets) or isinstance(self._key.models, dict)

    def begin_request(self) -> None:
        """Count a request, or raise QuotaExceeded if a quota is used up."""
        self._check()
        self._take("requests", 1)
        self.counters.requests.inc()

    def _check(self) -> None:
        if self._whole is not None:
            self._whole._check()
        for what, bucket in self._buckets.items():
            if bucket.level < 1:
                raise self._exceeded(what, bucket)

    def _take(self, what: str, amount: int) -> None:
        if self._whole is not None:
            self._whole._take(what, amount)
        if what in self._buckets:
            self._buckets[what].take(amount)

    def _exceeded(self, what: str, bucket: Bucket) -> QuotaExceeded:
        self.counters.refusals.inc()
        quota = f"{bucket.limit} {what} per minute" + (f" of {self._model}" if self._model else "")
        return QuotaExceeded(
            f"Rate limit reached for {self._key.name}: {quota}. Try again later.",
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
        """The headers from which OpenAI's clients know what is left of quotas: of two, of the scarcer one."""
        found: RawHeaders = []
        beside = {} if self._whole is None else self._whole._buckets
        for name in ("requests", "tokens"):
            both = [buckets[name] for buckets in (self._buckets, beside) if name in buckets]
            if not both:
                continue
            bucket, what = min(both, key=lambda one: one.level), name.encode()
            found.append((b"x-ratelimit-limit-" + what, b"%d" % bucket.limit))
            found.append((b"x-ratelimit-remaining-" + what, b"%d" % max(0, floor(bucket.level))))
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
