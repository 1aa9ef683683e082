"""The keys that are valid now, and who holds them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence

from server.access.callers import Caller
from server.access.keys.key import Key

OPERATOR = Caller()
"""Whoever holds one of the keys of --api-key, which have all rights and no name."""


class Keyring:
    """Finds the holder of a key.

    A key is looked up by a keyed digest, whose secret this process has made: what a look-up compares, and how
    long it takes, tells nothing of any key, as nobody outside can know what the digests begin with.
    """

    def __init__(self, plain: Iterable[str]) -> None:
        """`plain` are keys as they are written on the command line or in a variable."""
        self._secret = secrets.token_bytes(32)
        self._plain = {self._index(_digest(key.encode())): OPERATOR for key in plain}
        self._holders = self._plain

    def replace(self, keys: Sequence[Key], callers: Sequence[Caller]) -> None:
        """Let these keys of a file be valid from now on, and no others but the plain ones."""
        found = {self._index(bytes.fromhex(key.sha256)): one for key, one in zip(keys, callers, strict=True)}
        self._holders = {**found, **self._plain}

    def holder(self, key: bytes) -> Caller | None:
        return self._holders.get(self._index(_digest(key)))

    def _index(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
