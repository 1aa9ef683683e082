"""The state of the server: shown by the health routes, and the reason why a request is refused now."""

from __future__ import annotations

import msgspec


class Starting(msgspec.Struct, frozen=True):
    stage: str
    """One of start, download, import, weights, cache, warmup; or tokenizer, while only that is missing."""
    fraction: float
    """The part of this stage that is done, 0 to 1."""


class Ready(msgspec.Struct, frozen=True):
    pass


class Draining(msgspec.Struct, frozen=True):
    """The server finishes the requests that it has, takes no new ones, and ends."""


class Dead(msgspec.Struct, frozen=True):
    reason: str


Status = Starting | Ready | Draining | Dead
