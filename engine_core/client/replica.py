"""The state of one engine as an API server knows it, and sums over all engines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from msgspec.structs import replace

from engine_core.engine_stats import AdapterStats, Buckets, GuessTotals, Rates, Stats
from engine_core.protocol import Progress, Ready
from engine_core.reason_codes import PHASES
from worker.child import STOPPED, describe_exit

DECODE_TOKENS = 32
"""The load of a request that is being generated, in tokens. It needs one a step, but for many steps."""

EndCode = Literal["engine_lost", "engine_killed", "engine_broke", "engine_stopped"]
"""How the last process of a replica ended: its connection ended and no more is known, a signal killed it, it
exited because something broke, or it was asked to end."""

Stalled = Literal["engine_stalled"]
"""The state of replicas that have work and make no progress."""

_SAME = ("model", "architecture", "vocab_size", "scheduling_policy")
_SAME_IN_WORKERS = ("dtype", "tasks", "widths")
"""Fields of Ready, and of its WorkerFacts, that are the same for all replicas of one model."""


class Replica:
    """An engine under its number, which a process that is started in its place keeps."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = 0
        """The number of this server's requests that it has."""
        self.tokens = 0
        """The tokens that it has to compute for them, as far as is known here."""
        self.reachable = False
        self.end_code: EndCode | None = None
        """How its last process ended, until another one works in its place."""
        self.slept = False
        """Whether a process slept when it ended, and the next one is still to: nobody has ordered to wake."""
        self.start_seconds = 0.0
        """The time that its last start took, as far as is known here."""
        self.reset()

    def reset(self) -> None:
        """Forget the process that had this number: another one starts."""
        self.progress = Progress(phase="start", fraction=0.0)
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.lost: str | None = None
        """The reason why it has ended, until another process takes its place."""
        self.given_up = False
        """Whether no other process will take its place."""
        self.stalled = False
        """Whether it has work and makes no progress, so that it gets no more."""
        self.leaving = False
        """Whether it finishes its requests and takes no others."""
        self.asleep = False
        """Whether it has given weights and cache back, and has to be woken."""
        self.spelled = False
        """Whether it has been told how tokens are spelled."""
        self.connected = False
        """Whether answers can come from it."""
        self.connected_at = 0.0
        """When that was first known, on the monotonic clock."""

    def lose(self, reason: str) -> None:
        self.slept |= self.asleep
        self.reset()
        self.lost = reason
        self.end_code = "engine_lost"

    def how_it_ended(self, how: str = "") -> str:
        return f"the engine process ended while {PHASES[self.progress.phase]}{how}"

    def explain_loss(self, exit_code: int) -> None:
        """Note how its process exited. The end of its connection told less, if that was seen first."""
        if exit_code < 0 and self.lost is not None and self.end_code == "engine_lost":
            how = describe_exit(exit_code)
            self.lost = self.lost if self.lost.endswith(how) else f"{self.lost}: {how}"
        self.end_code = end_code(exit_code)

    def note_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.asleep |= progress.phase == "asleep"

    def begin_work(self, ready: Ready) -> None:
        self.ready, self.end_code, self.asleep = ready, None, False
        self.start_seconds = ready.start_seconds
        self.progress = replace(self.progress, phase="ready", fraction=1.0)

    @property
    def works(self) -> bool:
        return self.ready is not None and self.reachable and self.lost is None

    @property
    def takes_requests(self) -> bool:
        return self.works and not self.leaving and not self.stalled

    def load(self, *, others: bool) -> int:
        """Tokens in flight. With `others`, other servers' requests count too, if the engine reports them."""
        if not others or self.stats is None:
            return self.tokens
        return self.tokens + DECODE_TOKENS * max(0, self.stats.running + self.stats.waiting - self.requests)


def end_code(exit_code: int) -> EndCode:
    """How a process with this exit code ended; a negative code is a signal."""
    if exit_code < 0:
        return "engine_killed"
    return "engine_stopped" if exit_code == STOPPED else "engine_broke"


def all_ready(replicas: Sequence[Replica]) -> Ready | None:
    """The facts of all replicas that work, as of one engine that can do what each of them can."""
    known = [one.ready for one in replicas if one.ready is not None]
    if not known:
        return None
    workers = [one.worker for one in known]
    worker = replace(
        workers[0],
        max_model_len=min(one.max_model_len for one in workers),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in workers),
        max_num_seqs=sum(one.max_num_seqs for one in workers),
        num_blocks=sum(one.num_blocks for one in workers),
        fingerprint=workers[0].fingerprint if len({one.fingerprint for one in workers}) == 1 else "",
    )
    caches = all(one.enable_prefix_caching for one in known)
    return replace(known[0], enable_prefix_caching=caches, worker=worker)


def all_stats(replicas: Sequence[Replica]) -> Stats | None:
    """The sums of the statistics of all replicas; the mean of the cache's usage, the shortest wait."""
    known = [one.stats for one in replicas if one.stats is not None]
    if len(known) <= 1:
        return known[0] if known else None
    apart = dict.fromkeys(("landed", "disk", "host"))  # these are shown by engine
    special = ("kv_usage", "expected_wait", "rates", "guesses", "adapters", *apart)
    names = [name for name in Stats.__struct_fields__ if name not in special]
    return Stats(
        **{name: sum(getattr(one, name) for one in known) for name in names},
        **apart,
        kv_usage=sum(one.kv_usage for one in known) / len(known),
        expected_wait=min(one.expected_wait for one in known),
        adapters=_all_adapters([one.adapters for one in known if one.adapters is not None]),
        rates=_all_rates([one.rates for one in known if one.rates is not None]),
        guesses=_all_guesses([one.guesses for one in known if one.guesses is not None]),
    )


def _all_rates(known: Sequence[Rates]) -> Rates | None:
    if not known:
        return None
    return Rates(
        prompt_rate=sum(one.prompt_rate for one in known),
        step=sum(one.step for one in known) / len(known),
        step_rows=sum(one.step_rows for one in known),
        step_prompts=sum(one.step_prompts for one in known),
        stop_rate=sum(one.stop_rate for one in known) / len(known),
    )


def _all_guesses(known: Sequence[GuessTotals]) -> GuessTotals | None:
    if not known:
        return None
    held = [sum(at) for at in zip_longest(*(one.held for one in known), fillvalue=0)]
    return GuessTotals(sum(one.drafts for one in known), sum(one.guessed for one in known), held)


def _all_adapters(known: Sequence[AdapterStats]) -> AdapterStats | None:
    if not known:
        return None
    running = sorted({name for one in known for name in one.running})
    waiting = sorted({name for one in known for name in one.waiting})
    counts = tuple(map(sum, zip(*(one.loads.counts for one in known), strict=True)))
    loads = Buckets(counts, sum(one.loads.total for one in known))
    return AdapterStats(running, waiting, max(one.resident for one in known), loads)


def all_progress(replicas: Sequence[Replica]) -> Progress:
    """The progress of the replica nearest to ready; if there are several, its detail lists every one."""
    order = list(PHASES)
    first = max((one.progress for one in replicas), key=lambda now: (order.index(now.phase), now.fraction))
    if len(replicas) == 1:
        return first
    return replace(first, detail=", ".join(map(_describe, replicas)))


def difference(ready: Ready, others: Ready) -> str | None:
    """A clause for the operator on why this engine cannot be a replica of the others; None if it can."""
    pairs = [(name, getattr(ready, name), getattr(others, name)) for name in _SAME]
    pairs += [(name, getattr(ready.worker, name), getattr(others.worker, name)) for name in _SAME_IN_WORKERS]
    for name, one, other in pairs:
        if one != other:
            return f"its {name} is {one!r}, and that of the others {other!r}"
    return None


def _describe(replica: Replica) -> str:
    now = replica.progress
    if replica.lost is not None:
        return f"replica {replica.number} has ended"
    if now.phase in ("start", "ready"):
        return f"replica {replica.number} {'is ready' if now.phase == 'ready' else 'starts'}"
    detail = f" ({now.detail})" if now.detail else ""
    return f"replica {replica.number}: {now.phase} {now.fraction:.0%}{detail}"
