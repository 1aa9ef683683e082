"""How far the server is: what the health routes tell, and why a request cannot be taken now."""

from __future__ import annotations

import msgspec


class Starting(msgspec.Struct, frozen=True):
    stage: str
    """start, download, import, weights, cache, warmup; or tokenizer, while only that is missing."""
    fraction: float
    """Of this stage."""


class Ready(msgspec.Struct, frozen=True):
    pass


class Draining(msgspec.Struct, frozen=True):
    """Finishes what it has, takes nothing new, and ends."""


class Dead(msgspec.Struct, frozen=True):
    reason: str


Status = Starting | Ready | Draining | Dead
