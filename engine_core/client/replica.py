"""What an API server knows of one of its engines, and what it knows of all of them together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine_core.client.routing import GENERATING
from engine_core.protocol import STAGES, Progress, Ready, Stats

_SAME = ("model", "architecture", "vocab_size", "dtype", "tasks", "widths", "scheduling_policy")
"""What replicas of one model have in common, by the names in Ready."""


class Replica:
    """`lost` says why it is gone, until it greets again."""

    __slots__ = (
        "heard",
        "leaving",
        "lost",
        "number",
        "open",
        "progress",
        "reachable",
        "ready",
        "stats",
        "tokens",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.open = 0
        """Requests of ours that it has."""
        self.tokens = 0
        """What they give it to compute, as far as is known here."""
        self.reachable = False
        self.begin()

    def begin(self) -> None:
        """A process of that number has begun its life."""
        self.progress = Progress(stage="start", fraction=0.0)
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.lost: str | None = None
        self.leaving = False
        self.heard = False

    def lose(self, reason: str) -> None:
        self.begin()
        self.lost = reason

    @property
    def works(self) -> bool:
        return self.ready is not None and self.reachable and self.lost is None

    @property
    def takes_requests(self) -> bool:
        return self.works and not self.leaving

    def load(self, *, others: bool) -> int:
        """Tokens in flight. With `others`, other servers' requests count too, as far as the engine tells."""
        if not others or self.stats is None:
            return self.tokens
        return self.tokens + GENERATING * max(0, self.stats.running + self.stats.waiting - self.open)


def all_ready(replicas: Sequence[Replica]) -> Ready | None:
    """Those that work, as one engine that can do what each of them can."""
    known = [one.ready for one in replicas if one.ready is not None]
    if not known:
        return None
    return msgspec.structs.replace(
        known[0],
        max_model_len=min(one.max_model_len for one in known),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in known),
        max_num_seqs=sum(one.max_num_seqs for one in known),
        num_blocks=sum(one.num_blocks for one in known),
        enable_prefix_caching=all(one.enable_prefix_caching for one in known),
    )


def all_stats(replicas: Sequence[Replica]) -> Stats | None:
    known = [one.stats for one in replicas if one.stats is not None]
    if len(known) <= 1:
        return known[0] if known else None
    totals = {name: sum(getattr(one, name) for one in known) for name in Stats.__struct_fields__}
    return Stats(**{**totals, "kv_usage": totals["kv_usage"] / len(known)})


def all_progress(replicas: Sequence[Replica]) -> Progress:
    """The progress of the replica nearest to ready; if there are several, its detail lists every one."""
    order = list(STAGES)
    first = max((one.progress for one in replicas), key=lambda now: (order.index(now.stage), now.fraction))
    if len(replicas) == 1:
        return first
    return msgspec.structs.replace(first, detail=", ".join(map(_told, replicas)))


def difference(ready: Ready, others: Ready) -> str | None:
    """In what this engine is no replica of the others, in words for the operator."""
    for name in _SAME:
        own, theirs = getattr(ready, name), getattr(others, name)
        if own != theirs:
            return f"its {name} is {own!r}, and that of the others {theirs!r}"
    return None


def _told(replica: Replica) -> str:
    now = replica.progress
    if replica.lost is not None:
        return f"replica {replica.number} has ended"
    if now.stage in ("start", "ready"):
        return f"replica {replica.number} {'is ready' if now.stage == 'ready' else 'starts'}"
    detail = f" ({now.detail})" if now.detail else ""
    return f"replica {replica.number}: {now.stage} {now.fraction:.0%}{detail}"
