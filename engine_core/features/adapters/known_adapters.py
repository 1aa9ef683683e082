"""Records of an engine's adapters, of their loading, and of the requests that wait for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine_core.adapters.messages import Adapter
from engine_core.engine_stats import AdapterStats, PlainHistogram
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import AddRequest
from worker.calls.messages import AdapterFacts

if TYPE_CHECKING:
    from engine_core.executor import CallFuture


@dataclass(slots=True, eq=False)
class KnownAdapter:
    adapter: Adapter
    """The adapter under the name that it was given last."""
    number: int = 0
    """The number by which workers have it, or will; 0: they do not."""
    facts: AdapterFacts | None = None
    """What workers have told of it; None: they do not have it."""
    told: AdapterFacts | None = None
    """What they, or those of another engine, told when they loaded it last; None: none have."""
    users: int = 0
    """The live sequences that use it."""
    waiting: int = 0
    """The requests that wait for it."""
    rank: int = 0
    """The best rank of the requests that wait for it, or that of the last one, if none does."""
    used: int = 0
    """When it was used last, counted in uses of all."""
    left: float = 0.0
    """The time at which the last sequence that used it has ended, or at which it was loaded."""
    wanted: float = 0.0
    """The time since which it is to be loaded, if it is."""
    is_closing: bool = False
    """Whether it takes no more sequences, because another adapter needs its place."""
    untold: list[Adapter] = field(default_factory=list[Adapter])
    """The names under which it was asked for, of which servers are to be told when it is loaded."""

    def first_position(self, prompt: list[int]) -> int | None:
        """The first position that it computes of a prompt; None if it computes none."""
        tokens = list(self.adapter.invocation)
        for start in range(len(prompt) - len(tokens), -1, -1) if tokens else ():
            if prompt[start : start + len(tokens)] == tokens:
                return start + 1
        return None if tokens else 0

    def ask_for(self, adapter: Adapter) -> None:
        """Note that it is asked for under the name that it has here."""
        self.adapter = adapter
        self.untold.append(adapter)

    def withdraw(self, name: str, ordered: int) -> Adapter | None:
        """Forget that it was asked for under this name up to a time; returns it as it was, if it was."""
        found = next((each for each in self.untold if each.name == name and each.ordered <= ordered), None)
        if found is not None:
            self.untold.remove(found)
        return found

    @property
    def takes_requests(self) -> bool:
        return self.facts is not None and not self.is_closing


def idlest(adapters: Iterable[KnownAdapter]) -> KnownAdapter | None:
    """The adapter whose place another one gets; None if all are in use."""
    idle = [
        one
        for one in adapters
        if one.number and not one.users and (one.is_closing or not (one.waiting or one.untold))
    ]
    return min(idle, key=lambda one: (not one.is_closing, one.used), default=None)


def stats_of(adapters: Collection[KnownAdapter], loads: PlainHistogram) -> AdapterStats:
    """Counts of adapters that run, are waited for and are loaded, and of the times of loads."""
    return AdapterStats(
        running=sorted(one.adapter.name for one in adapters if one.users),
        waiting=sorted(one.adapter.name for one in adapters if one.waiting),
        resident=sum(one.facts is not None for one in adapters),
        loads=loads.buckets,
    )


@dataclass(slots=True)
class AdapterLoad:
    """An adapter that workers read beside steps, and then let steps compute with."""

    known: KnownAdapter
    call: CallFuture
    since: float
    facts: AdapterFacts | None = None
    """What workers have told of it; None: they are still reading it."""


@dataclass(slots=True)
class RequestForAdapter:
    client: int
    request: AddRequest
    matcher: TokenMatcher | None
    known: KnownAdapter
    paused: bool = False
    """Whether nothing shall be computed for it yet."""

    def wait_for(self, other: KnownAdapter) -> None:
        """Have it use another adapter."""
        self.known.waiting, other.waiting = self.known.waiting - 1, other.waiting + 1
        self.known, self.request = other, replace(self.request, adapter=other.adapter.digest)
