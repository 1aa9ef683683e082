"""Chooses the adapters that sequences of a step may have: a worker computes so many at a time."""

from __future__ import annotations

from msgspec.structs import replace

from engine_core.engine_stats import Stats
from engine_core.features.adapters.adapter_table import AdapterTable
from engine_core.protocol import AddRequest
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import StepBuilder
from engine_core.scheduling.sequence import Sequence
from worker.options import LoraOptions
from worker.protocol import NewSeq
from worker.worker_facts import WorkerFacts

PATIENCE = 16
"""The steps for which running sequences of other adapters may keep one from beginning."""


class AdapterTurns(Feature):
    """Has sequences computed by the adapters that their requests name.

    If there are too many for a step, those of the best rank have the next one, and of these those whose last
    step is longest ago.
    """

    def __init__(self, options: LoraOptions, *, by_priority: bool = False) -> None:
        self._most, self._by_priority = options.most_in_step, by_priority
        self.held = options.most
        """How many adapters the workers hold at most."""
        self.table: AdapterTable | None = None
        """The adapters that are known; set before a request comes."""
        self._users: dict[Sequence, tuple[int, int]] = {}
        """The number of the adapter of each sequence that has one, and the first position it computes."""
        self._step = 0
        self._last: dict[int, int] = {}
        """Adapter -> the step that it was in last."""
        self._passed: dict[int, tuple[int, int]] = {}
        """Adapter -> the best rank of sequences of it that wait for room in steps, and the step since which
        some have."""
        self._taken: set[int] = set()
        self._left = self._most

    def rank_of(self, request: AddRequest) -> int:
        """The rank of a request among those for other adapters, of which the lowest comes first."""
        return request.priority if self._by_priority else 0

    def facts_of(self, add: AddRequest, facts: WorkerFacts) -> WorkerFacts:
        return facts if self.table is None else self.table.facts_of(add, facts)

    def enter(self, seq: Sequence) -> None:
        """Have a sequence use the adapter of its request, if that computes anything of it."""
        request = seq.request
        if not request.adapter or self.table is None:
            return
        first = self.table.first_position(request.adapter, request.tokens[: seq.prompt_len])
        if first is None:
            seq.request = replace(request, adapter="")  # and it shares what the model alone computes
            return
        self._users[seq] = self.table.begin(request.adapter), first
        seq.mark(first, b"adapter " + request.adapter.encode())  # all before is computed by the model alone

    def leave(self, seq: Sequence) -> None:
        if self._users.pop(seq, None) and self.table is not None:
            self.table.end(seq.request.adapter)

    def stop(self) -> None:
        """Take note that workers lose all adapters, if the engine only falls asleep."""
        if self.table is not None:
            self.table.fall_asleep()

    def add_stats(self, stats: Stats) -> Stats:
        return stats if self.table is None else replace(stats, adapters=self.table.stats)

    def admit(self, seq: Sequence, new: NewSeq, step: StepBuilder) -> NewSeq:
        if (user := self._users.get(seq)) is None:
            return new
        number, first = user
        self._take(number)
        return replace(new, adapter=number, adapter_from=first)

    def choose(self, runnable: list[Sequence]) -> list[Sequence]:
        """Choose among the adapters of running sequences. What is left is for whichever comes first."""
        self._step += 1
        wanted: dict[int, int] = {}
        for seq in runnable:
            if seq in self._users:
                rank, (adapter, _) = self.rank_of(seq.request), self._users[seq]
                wanted[adapter] = min(rank, wanted.get(adapter, rank))
        worst = max(wanted.values(), default=0)
        overdue = [
            one
            for one, (rank, since) in self._passed.items()
            if rank < worst or (rank == worst and self._step - since >= PATIENCE)
        ]
        for adapter in overdue[: self._most]:
            # It may be aborted: then the place is free in the next step.
            wanted[adapter] = min(self._passed.pop(adapter)[0], wanted.get(adapter, worst))
        first = sorted(wanted, key=lambda one: (wanted[one], one not in overdue, self._last.get(one, 0)))
        self._taken = set(first[: self._most])
        self._last.update(dict.fromkeys(self._taken, self._step))
        self._left = self._most - len(self._taken)
        return [seq for seq in runnable if self.may_run(seq)]

    def may_run(self, seq: Sequence) -> bool:
        """Say whether there is room for the adapter of a sequence."""
        adapter, _ = self._users.get(seq, (0, 0))
        if not adapter or adapter in self._taken or self._left:
            return True
        rank, since = self._passed.get(adapter, (self.rank_of(seq.request), self._step))
        self._passed[adapter] = min(rank, self.rank_of(seq.request)), since
        return False

    def _take(self, adapter: int) -> None:
        """Note that a sequence of this adapter gets a row."""
        if adapter not in self._taken:
            self._taken.add(adapter)
            self._last[adapter] = self._step
            self._passed.pop(adapter, None)
            self._left -= 1
