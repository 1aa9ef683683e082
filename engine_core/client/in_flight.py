"""A request between its submission and its last answer: the request, the replica that has it, its stream."""

from __future__ import annotations

from typing import Any

from engine_core.client.replica import Replica
from engine_core.client.routing import DECODE_TOKENS
from engine_core.client.streams import Stream
from engine_core.protocol import Add


class InFlight:
    __slots__ = ("add", "pin", "replica", "started", "stream", "tokens")

    def __init__(self, add: Add, stream: Stream[Any], pin: int | None = None) -> None:
        self.add = add
        self.stream = stream
        self.pin = pin
        """The one replica that may have it, if the client named one."""
        self.replica: Replica | None = None
        self.started = False
        """Whether an answer has come: from then on no other replica can take it over."""
        self.tokens = 0
        """Its share of the replica's load, in tokens to compute."""

    @property
    def id(self) -> int:
        return self.add.id

    def assign(self, replica: Replica, tokens: int) -> None:
        """Count the request as one of this replica's, which has to compute so many tokens for it."""
        self.replica, self.tokens = replica, tokens
        replica.requests += 1
        replica.tokens += tokens

    def start(self) -> None:
        """Note that its first token has come: its prompt is computed."""
        self.started = True
        if self.replica is not None:
            self.replica.tokens += DECODE_TOKENS - self.tokens
        self.tokens = DECODE_TOKENS

    def unassign(self) -> None:
        """Take the request off the load of its replica, which has nothing more to do for it."""
        if self.replica is not None:
            self.replica.requests -= 1
            self.replica.tokens -= self.tokens
        self.replica = None
