"""What becomes of a request whose engine has ended: another one takes it over, unless it is to blame.

An answer that had begun goes on in another engine behind the tokens that have come. Nobody says what an
engine computed when it was killed, so all that it may have computed are suspects. One that was there twice,
and got nowhere in between, runs alone in the next engine (`Add.alone`). If that engine ends too, the request
is to blame, and is refused for a while, whoever sends it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from engine_core.client.in_flight import InFlight
from engine_core.protocol import ALONE_TOKENS, Add, Ready
from worker.protocol import Sampling, WorkerFacts

STRIKES = 2
"""The strikes with which a request runs alone."""
SECONDS = 600.0
"""The time for which a request that made engines end is refused."""
MOST = 1 << 10
"""The most requests that are refused."""

_log = logging.getLogger(__name__)


def take_back(one: InFlight) -> None:
    """Make it a request for another replica, which goes on behind the tokens that have come.

    That one does not say again what comes with the first token.
    """
    one.unassign()
    one.shorten()
    one.started = one.runs_alone = False
    one.resent = len(one.emitted)
    add, params = one.add, one.add.params
    alone = one.strikes >= STRIKES
    if not one.emitted or not isinstance(params, Sampling):
        one.add = replace(add, alone=alone) if alone != add.alone else add
        return
    prompt = _prompt(add)
    one.add = replace(
        add,
        alone=alone,
        tokens=prompt + one.emitted.tolist(),
        prompt_len=len(prompt),
        began=one.began if add.sent else 0.0,
        params=replace(params, prompt_logprobs=None),
        diagnoses=False,
    )


def can_go_on(one: InFlight, facts: WorkerFacts) -> bool:
    """Whether an engine of these facts would emit the very tokens that are still to come."""
    if not one.emitted or one.facts is None:
        return True
    same_limit = _token_limit(one.add, facts) == _token_limit(one.add, one.facts)
    return facts.fingerprint == one.facts.fingerprint and same_limit


def _token_limit(add: Add, facts: WorkerFacts) -> int:
    """The number of tokens, the prompt's included, at which an engine of these facts ends an answer."""
    most = add.params.max_tokens if isinstance(add.params, Sampling) else 0
    return min(len(_prompt(add)) + most, facts.max_model_len)


def blame(requests: list[InFlight], ready: Ready) -> InFlight | None:
    """Count the end of their engine against requests; returns the one that is to blame, if that is known."""
    for one in requests:
        if one.runs_alone and one.progress < ALONE_TOKENS:
            return one
    for one in _computed(requests, ready):
        # One that makes engines end does so where it did before, or a few tokens later.
        one.strikes = 1 if one.progress >= ALONE_TOKENS else one.strikes + 1
    return None


def _computed(requests: list[InFlight], ready: Ready) -> Iterator[InFlight]:
    """The requests that an engine may have computed: those that had begun, and the next ones in order."""
    by_priority = ready.scheduling_policy == "priority"
    waiting = [one for one in requests if not one.started]
    waiting.sort(key=lambda one: one.add.priority if by_priority else one.add.priority > 0)
    slots = ready.worker.max_num_seqs
    yield from (one for one in requests if one.started)
    yield from [one for one in waiting if one.stream.pools][:slots]
    yield from [one for one in waiting if not one.stream.pools][:slots]


class Quarantine:
    """The requests that made engines fail, whoever sends them again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.digests: OrderedDict[bytes, float] = OrderedDict()
        """The digest of each, and when it was put here. The oldest come first."""

    def put(self, add: Add) -> None:
        """Refuse a request from now on."""
        digest = _digest(add)
        self.digests[digest] = self._clock()
        self.digests.move_to_end(digest)
        if len(self.digests) > MOST:
            self.digests.popitem(last=False)
        count, name = len(_prompt(add)), digest.hex()[:8]
        _log.error("request %d (%s), with a prompt of %d tokens, makes the engine fail", add.id, name, count)

    def holds(self, add: Add) -> bool:
        """Whether a request is refused."""
        oldest_allowed = self._clock() - SECONDS
        while self.digests and next(iter(self.digests.values())) < oldest_allowed:
            self.digests.popitem(last=False)
        return bool(self.digests) and _digest(add) in self.digests


def _digest(add: Add) -> bytes:
    """A digest of the prompt and of all parameters but those that a server draws for each request."""
    params = add.params
    if isinstance(params, Sampling):
        params = replace(params, seed=0, prompt_logprobs=None)
    else:
        params = replace(params, late_query="", late_document="")
    return hashlib.blake2b(msgspec.msgpack.encode((_prompt(add), params)), digest_size=16).digest()


def _prompt(add: Add) -> list[int]:
    return add.tokens[: add.prompt_len] if add.prompt_len else add.tokens
