"""What recordings of steps have in common, whatever device replays them."""

from __future__ import annotations

from typing import Any

from models.context import ForwardContext


class Unrecordable(Exception):
    """A step cannot be recorded; the message says why."""


class UnreadStep(ForwardContext):
    """A step whose lengths must not be read on the host.

    By them a model may choose to compute something else next time, of which a recording would know nothing.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in ("query_lens_host", "kv_lens_host"):
            raise Unrecordable(f"it reads {name}")
        return super().__getattribute__(name)
