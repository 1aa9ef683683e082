"""A request between its submission and its last answer: the request, the replica that has it, its stream.

An answer that an engine has begun to generate goes on in another engine behind the tokens that have come.
"""

from __future__ import annotations

import time
from array import array
from math import inf
from typing import Any

from msgspec.structs import replace

from engine_core.client.replica import Replica
from engine_core.client.routing import DECODE_TOKENS
from engine_core.client.streams import Stream
from engine_core.protocol import Add
from worker.protocol import Sampling, WorkerFacts

STRIKES = 2
"""The strikes with which a request runs alone."""

_LEAST = 1e-3
"""The seconds that a request is told to have that has none: 0 would be any number of them."""

_NONE: array[int] = array("i")


class InFlight:
    __slots__ = (
        "add",
        "began",
        "deadline",
        "emitted",
        "facts",
        "paused",
        "pin",
        "replica",
        "resent",
        "runs_alone",
        "since",
        "started",
        "stream",
        "strikes",
        "tokens",
    )

    def __init__(self, add: Add, stream: Stream[Any], pin: int | None = None) -> None:
        self.add = add
        """The request as it is sent next."""
        self.stream = stream
        self.pin = pin
        """The one replica that may have it, if the client named one."""
        self.since = time.monotonic() if add.wait or add.budget else 0.0
        """When the times that `add` gives it began, if it gives it any."""
        self.replica: Replica | None = None
        self.deadline: float | None = None
        """The time on the event loop's clock until which it may wait for a replica, if it waits for one."""
        self.paused = False
        """Whether its answer is not read, so that nothing shall be computed for it."""
        self.started = False
        """Whether an answer has come from its replica."""
        self.emitted: array[int] = _NONE
        """The tokens that are in the stream, from whichever engines."""
        self.began = 0.0
        """The time at which the first of them came."""
        self.facts: WorkerFacts | None = None
        """The facts of the engine from which the last of them came."""
        self.strikes = 0
        """The engines that have ended in a row while they may have computed it, and it got nowhere."""
        self.resent = 0
        """The tokens that had come when it was sent last."""
        self.runs_alone = False
        """Whether its engine has said that it runs alone."""
        self.tokens = 0
        """Its share of the replica's load, in tokens to compute."""

    @property
    def id(self) -> int:
        return self.add.id

    @property
    def progress(self) -> int:
        """The tokens that have come since it was sent last."""
        return len(self.emitted) - self.resent

    def assign(self, replica: Replica, tokens: int) -> None:
        """Count the request as one of this replica's, which has to compute so many tokens for it."""
        self.replica, self.tokens, self.deadline = replica, tokens, None
        replica.requests += 1
        replica.tokens += tokens

    def start(self) -> None:
        """Note that its replica gives its first token: what it had to read is computed."""
        self.started = True
        if not self.emitted:
            self.emitted, self.began = array("i"), time.monotonic()
        if self.replica is not None:
            self.replica.tokens += DECODE_TOKENS - self.tokens
            self.facts = self.replica.ready.worker if self.replica.ready is not None else None
        self.tokens = DECODE_TOKENS

    def unassign(self) -> None:
        """Take the request off the load of its replica, which does nothing more for it."""
        if self.replica is not None:
            self.replica.requests -= 1
            self.replica.tokens -= self.tokens
        self.replica = None

    def take_back(self) -> None:
        """Make it a request for another replica, which goes on behind the tokens that have come.

        That one does not say again what comes with the first token.
        """
        self.unassign()
        self.shorten()
        self.started = self.runs_alone = False
        self.resent = len(self.emitted)
        add, params = self.add, self.add.params
        alone = self.strikes >= STRIKES
        if not self.emitted or not isinstance(params, Sampling):
            self.add = replace(add, alone=alone) if alone != add.alone else add
            return
        prompt = add.tokens[: add.prompt_len] if add.prompt_len else add.tokens
        self.add = replace(
            add,
            alone=alone,
            tokens=prompt + self.emitted.tolist(),
            prompt_len=len(prompt),
            began=self.began if add.sent else 0.0,
            params=replace(params, prompt_logprobs=None),
            diagnoses=False,
        )

    @property
    def seconds_left(self) -> float:
        """The seconds that it may still take, or wait if it has not begun."""
        add = self.add
        limits = [add.budget, 0.0 if self.emitted else add.wait]
        return min([limit for limit in limits if limit], default=inf) - (time.monotonic() - self.since)

    def shorten(self) -> None:
        """Take the time that has passed off the times that its next engine is told, if it cannot know it."""
        if not self.since or self.add.sent:
            return
        now = time.monotonic()
        passed, self.since = now - self.since, now
        wait, budget = [
            max(limit - passed, _LEAST) if limit else 0.0 for limit in (self.add.wait, self.add.budget)
        ]
        self.add = replace(self.add, wait=wait, budget=budget)

    def can_go_on(self, facts: WorkerFacts) -> bool:
        """Whether an engine of these facts would emit the very tokens that are still to come."""
        if not self.emitted or self.facts is None:
            return True
        return facts.fingerprint == self.facts.fingerprint and self._limit(facts) == self._limit(self.facts)

    def _limit(self, facts: WorkerFacts) -> int:
        """The number of tokens, the prompt's included, at which an engine of these facts ends its answer."""
        params = self.add.params
        most = params.max_tokens if isinstance(params, Sampling) else 0
        return min((self.add.prompt_len or len(self.add.tokens)) + most, facts.max_model_len)
