"""Tells who sends a request: its owner, its rights, its quotas and its deadlines."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, floor, inf
from typing import NamedTuple

from starlette.types import Scope

from engine_core.client.in_flight import AddOptions
from server.access.key_file import Key
from server.errors import BadRequest, DeadlineExceeded, QuotaExceeded, TooLate
from server.metrics.optional_metrics import KeyCounters
from server.options.server_flags import AccessOptions

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


_NETWORK = 64
"""The leading bits of an IPv6 address that name a client: one may have all addresses behind them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, and its rights."""

    owner: str = ""
    """The name under which all its requests share one part of the server."""
    weight: float = 1.0
    """Its part, in proportion to those of others."""
    max_running: int = 0
    """The answers and texts that an engine computes for it at a time, if not 0."""
    max_queued: int | None = None
    """The answers and texts that may wait, if not None."""
    key: Key | None = None
    """Its key, if that is one of a file: it says what the client may do."""
    account: Account | None = None
    """What was used with that key."""

    @property
    def key_name(self) -> str:
        """The name of its key, to which belongs what the server keeps for it; empty if that has none."""
        return "" if self.key is None else self.owner

    def for_model(self, names: Collection[str]) -> Caller | None:
        """This client, with its quotas for the model of these names; None if its key is for others."""
        own = "" if self.key is None else self.key.own_name(names)
        if own is None or self.account is None:
            return None if own is None else self
        return replace(self, account=self.account.for_model(own)) if own else self

    def add_options(self, priority: int, salt: str) -> AddOptions:
        """The options by which the engine treats a request as one of this client."""
        options: AddOptions = {"priority": priority, "owner": self.owner, "weight": self.weight, "salt": salt}
        if self.key is not None:
            options["priority"] = max(priority, self.key.priority)
            options["salt"] = self.key.salted(salt)
            if self.max_running:
                options["max_running"] = self.max_running
        return options


ANYONE = Caller()
"""The caller of a program that uses the engine directly, and of all clients that are not told apart."""


def caller_at(scope: Scope, *, by_address: bool) -> Caller:
    """The client at the other end of a connection. All clients of a Unix socket are one."""
    client = scope.get("client") if by_address else None
    return ANYONE if client is None else _caller_at(client[0])


@lru_cache(maxsize=1024)
def _caller_at(host: str) -> Caller:
    return Caller(_network_of(host))


def _network_of(host: str) -> str:
    """The address of an IPv4 client, or the network of an IPv6 client, which has many addresses."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _NETWORK), strict=False).network_address)


TIMEOUT = b"x-request-timeout"
"""The header that says how many seconds a request may take."""
MOST_SECONDS = 1e6
RETRY_SECONDS = 5
"""Seconds after which a client may try again whose time was over before the engine was asked."""

_NUMBER = re.compile(rb"[0-9]{1,8}(\.[0-9]{1,9})?")


class TimeLimits(NamedTuple):
    """Times on the monotonic clock, which never leave this process: engines are told durations."""

    begins: float
    """When the engine must have begun with the request."""
    ends: float
    """When the request must be answered."""

    def add_to(self, options: AddOptions, *, begun: bool = False) -> None:
        """Tell the engine what is left of the time. Raises TooLate if nothing is."""
        now = time.monotonic()
        if now >= self.ends and begun:
            raise DeadlineExceeded("The request has taken longer than it may.")
        if now >= self.ends or (now >= self.begins and not begun):
            raise TooLate("The request has waited for longer than it may.", retry_after=RETRY_SECONDS)
        if self.ends < inf:
            options["budget"] = self.ends - now
        if self.begins < inf and not begun:
            options["wait"] = self.begins - now


def limits_of(
    named: bytes | None, options: AccessOptions, arrived: float, asked: float | None
) -> TimeLimits | None:
    """The limits of a request that arrived at this time; None if it has none. `named` is in its header, and
    `asked` in its body."""
    seconds = options.request_timeout or inf
    if named is not None:
        seconds = min(seconds, _seconds(named))
    if asked is not None:
        seconds = min(seconds, asked)
    if seconds == inf and not options.max_queue_wait:
        return None
    return TimeLimits(arrived + (options.max_queue_wait or inf), arrived + seconds)


def _seconds(value: bytes) -> float:
    if not _NUMBER.fullmatch(value) or not 0 < (seconds := float(value)) <= MOST_SECONDS:
        shown = value[:20].decode("latin-1")
        raise BadRequest(
            f"X-Request-Timeout: {shown!r} is no number of seconds above 0 and up to {MOST_SECONDS:.0f}.",
            "X-Request-Timeout",
        )
    return seconds


def of_later_texts(options: AddOptions, seconds: float) -> AddOptions:
    """The options of texts that are sent so long after the first ones of their request."""
    if "wait" not in options and "budget" not in options:
        return options
    later = options.copy()
    later.pop("wait", None)
    if "budget" in later:
        later["budget"] -= seconds
        if later["budget"] <= 0:
            raise DeadlineExceeded("The request has taken longer than it may.")
    return later
