"""The state of the server: shown by the health routes, and the reason why a request is refused now."""

from __future__ import annotations

import msgspec

from engine_core.reason_codes import SENTENCES, Reason
from server.errors import Unavailable


class Starting(msgspec.Struct, frozen=True):
    stage: str
    """One of start, download, import, weights, cache, warmup; or tokenizer, while only that is missing."""
    fraction: float
    """The part of this stage that is done, 0 to 1."""


class Ready(msgspec.Struct, frozen=True):
    pass


class Restarting(msgspec.Struct, frozen=True):
    """No engine works, and one is started again. Requests are let in, and wait for it."""

    reason: Reason
    since: float
    """The time at which requests began to wait, on the monotonic clock."""


class Stalled(msgspec.Struct, frozen=True):
    """No engine that works makes progress. Requests are let in, and wait for one that does."""


class Draining(msgspec.Struct, frozen=True):
    """The server finishes the requests that it has, and ends."""

    refuses: bool
    """Whether it takes no new ones. Before that, load balancers have time to notice that it ends."""


class Dead(msgspec.Struct, frozen=True):
    reason: Reason


Status = Starting | Ready | Restarting | Stalled | Draining | Dead


def raise_if_refused(status: Status) -> None:
    """Raises Unavailable if requests are refused now. While an engine is started again, they wait."""
    match status:
        case Starting(stage, fraction):
            raise Unavailable(
                f"The model is still loading (stage {stage}, {fraction:.0%}). GET /ready tells when it is "
                "done.",
                retry_after=2,
                reason="loading",
            )
        case Draining(refuses=True):
            raise Unavailable(SENTENCES["draining"], retry_after=5, reason="draining")
        case Dead(reason):
            raise Unavailable(SENTENCES[reason], retry_after=10, reason=reason)
        case Ready() | Restarting() | Stalled() | Draining():
            pass
