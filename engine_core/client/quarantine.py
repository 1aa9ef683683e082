"""Refuses for a while the requests that made engines fail, whoever sends them again."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from engine_core.client.in_flight import prompt_of
from engine_core.protocol import AddRequest
from worker.protocol import Sampling

SECONDS = 600.0
"""The time for which a request that made engines end is refused."""
MOST = 1 << 10
"""The most requests that are refused."""

_log = logging.getLogger(__name__)


class Quarantine:
    """The requests that made engines fail, whoever sends them again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.digests: OrderedDict[bytes, float] = OrderedDict()
        """The digest of each, and when it was put here. The oldest come first."""

    def put(self, add: AddRequest) -> None:
        """Refuse a request from now on."""
        digest = _digest(add)
        self.digests[digest] = self._clock()
        self.digests.move_to_end(digest)
        if len(self.digests) > MOST:
            self.digests.popitem(last=False)
        count, name = len(prompt_of(add)), digest.hex()[:8]
        _log.error("request %d (%s), with a prompt of %d tokens, makes the engine fail", add.id, name, count)

    def holds(self, add: AddRequest) -> bool:
        """Whether a request is refused."""
        oldest_allowed = self._clock() - SECONDS
        while self.digests and next(iter(self.digests.values())) < oldest_allowed:
            self.digests.popitem(last=False)
        return bool(self.digests) and _digest(add) in self.digests


def _digest(add: AddRequest) -> bytes:
    """A digest of the prompt and of all parameters but those that a server draws for each request."""
    params = add.params
    if isinstance(params, Sampling):
        params = replace(params, seed=0, prompt_logprobs=None)
    else:
        params = replace(params, late_query="", late_document="")
    media = [(each.at, each.hash) for each in add.media]
    return hashlib.blake2b(
        msgspec.msgpack.encode((prompt_of(add), params, media, add.adapter)), digest_size=16
    ).digest()
