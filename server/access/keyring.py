"""Tells which keys are valid, which may change while the server runs, and tells clients apart."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from starlette.types import Scope

from engine_core.engine_stats import Stats
from server.access.admission import Admissions
from server.access.client_identity import Caller, caller_at
from server.access.key_file import FollowedKeyFile, Key
from server.access.quotas import Account
from server.access.request_state import state_of
from server.errors import ApiError
from server.metrics.optional_metrics import KeyCounters
from server.options.server_flags import AccessOptions

HeadCheck = Callable[[bytes, bytes, Scope], ApiError | None]
"""A function of a request's method, target and scope that tells why it is refused, if it is."""

OPERATOR = Caller()
"""Whoever holds one of the keys of --api-key, which have all rights and no name."""


class Access:
    """The keys of the command line and of the file, with what was used of each.

    A key is looked up by a keyed digest, whose secret this process has made: what a look-up compares, and how
    long it takes, tells nothing of any key, as nobody outside can know what the digests begin with.
    """

    def __init__(self, options: AccessOptions, counters_of: Callable[[str], KeyCounters]) -> None:
        """`counters_of` makes the metrics of the key of a name."""
        self.is_guarded = options.is_guarded
        """Whether requests need a key."""
        self.has_file = options.api_key_file is not None
        self._by_address = options.fair_between == "addresses"
        self._counters_of = counters_of
        self._secret = secrets.token_bytes(32)
        # Headers have no spaces around their values, nor the line's end of a secret's file.
        plain = (hashlib.sha256(key.strip().encode()).digest() for key in options.api_key)
        self._operators = {self._index(digest): OPERATOR for digest in plain}
        self._callers = self._operators
        self._accounts: dict[str, Account] = {}
        self._file: FollowedKeyFile | None = None
        if options.api_key_file is not None:
            self._file = FollowedKeyFile(Path(options.api_key_file), self.use)
            self._file.take(self._file.read())

    def _index(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def use(self, keys: Sequence[Key]) -> None:
        """Let these keys of a file be valid from now on, and no others but those of the command line."""
        self._accounts = {key.name: self._account(key) for key in keys}
        of_file = {self._index(bytes.fromhex(key.sha256)): self._caller(key) for key in keys}
        self._callers = {**of_file, **self._operators}

    def _account(self, key: Key) -> Account:
        """The account of a key: the same as before, if there was a key of this name."""
        known = self._accounts.get(key.name)
        if known is None:
            return Account(key, self._counters_of(key.name))
        known.update(key)
        return known

    def _caller(self, key: Key) -> Caller:
        return Caller(
            owner=key.name,
            weight=key.weight,
            max_running=key.max_running or 0,
            max_queued=key.max_queued,
            key=key,
            account=self._accounts[key.name],
        )

    def holder_named(self, name: str) -> Caller | None:
        """The holder of the key of a name; None if there is none any more."""
        return next((caller for caller in self._callers.values() if caller.owner == name), None)

    def holder(self, scope: Scope) -> Caller | None:
        """The holder of the key that a request brings; None if it brings no valid one."""
        key = _key_in(scope)
        return None if key is None else self._callers.get(self._index(hashlib.sha256(key).digest()))

    def enter(self, scope: Scope) -> Caller | None:
        """The client of a request of which only the head is known; None if its key is not valid.

        If it has a key of the file, it is noted as the caller.
        """
        if self.has_file:
            holder = self.holder(scope)
            if holder is None:
                return None
            if holder is not OPERATOR:
                if holder.key is not None and holder.key.has_expired():
                    return None
                state_of(scope).caller = holder
                return holder
        return caller_at(scope, by_address=self._by_address)

    def reload(self) -> None:
        """Have the file read again soon, changed or not."""
        if self._file is not None:
            self._file.ask()

    async def follow(self) -> None:
        """Reads the file again whenever it has changed."""
        if self._file is not None:
            await self._file.follow()


class _Refusal(NamedTuple):
    """The error that a client got from a full server, and the state of the server at that moment."""

    caller: Caller
    given: int
    live: int
    stats: Stats | None
    error: ApiError

    def stands_for(self, caller: Caller, admissions: Admissions) -> bool:
        """Whether this client would get the same error now."""
        same = self.given == admissions.given and self.live == admissions.live
        return same and self.caller is caller and self.stats is admissions.engines.stats


def head_check(admissions: Admissions, paths: Collection[str], access: Access) -> HeadCheck:
    """Makes the check of requests for `paths`, those of endpoints that ask the engine, at their heads.

    A full server then spends nothing else on them, and a crowd of one client gets the same error until a
    place is given or taken back. Others get a place, the `admission` of its state, until they end.
    """
    targets = frozenset(path.encode() for path in paths)
    last: _Refusal | None = None

    def check(method: bytes, target: bytes, scope: Scope) -> ApiError | None:
        nonlocal last
        if method != b"POST" or target not in targets or not admissions.slots:
            return None  # also for a path with a query: such a line may still turn out to be malformed
        caller = access.enter(scope)
        if caller is None:
            return None  # the application tells it so
        if last is not None and last.stands_for(caller, admissions):
            admissions.on_refusal()
            return last.error
        try:
            admission = admissions.take_free_place(caller)
        except ApiError as error:
            known = _Refusal(caller, admissions.given, admissions.live, admissions.engines.stats, error)
            last = known if caller.max_queued is None else None
            return error.with_traceback(None)  # it would hold the request
        if admission is not None:
            state_of(scope).admission = admission
        return None

    return check


def _key_in(scope: Scope) -> bytes | None:
    """The key that a request brings as `Authorization: Bearer KEY`, or as Anthropic's clients send it."""
    found = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            found = value.strip()
    return found
