"""A request between its submission and its last answer: what it asks, who answers, who reads."""

from __future__ import annotations

from typing import Any

from engine_core.client.replica import Replica
from engine_core.client.routing import GENERATING
from engine_core.client.streams import Stream
from engine_core.protocol import Add


class Order:
    __slots__ = ("add", "began", "pin", "replica", "stream", "tokens")

    def __init__(self, add: Add, stream: Stream[Any], pin: int | None = None) -> None:
        self.add = add
        self.stream = stream
        self.pin = pin
        """The one replica that may have it, if the client named one."""
        self.replica: Replica | None = None
        self.began = False
        """Whether an answer has come: from then on no other replica can take it over."""
        self.tokens = 0
        """What it adds to its replica's load."""

    @property
    def id(self) -> int:
        return self.add.id

    def place(self, replica: Replica, tokens: int) -> None:
        self.replica, self.tokens = replica, tokens
        replica.open += 1
        replica.tokens += tokens

    def begin(self) -> None:
        """Its first token has come, so its prompt is computed."""
        self.began = True
        if self.replica is not None:
            self.replica.tokens += GENERATING - self.tokens
        self.tokens = GENERATING

    def leave(self) -> None:
        """Its replica has nothing more to do for it."""
        if self.replica is not None:
            self.replica.open -= 1
            self.replica.tokens -= self.tokens
        self.replica = None
