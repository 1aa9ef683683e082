"""Chooses the adapters that sequences of a step may have: a worker computes so many at a time."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from engine_core.protocol import Add
from engine_core.scheduling.adapters.adapter_table import AdapterTable
from engine_core.scheduling.sequence import Sequence
from worker.options import LoraOptions

PATIENCE = 16
"""The steps for which running sequences of other adapters may keep one from beginning."""


class AdapterTurns:
    """If there are too many, those of the best rank have the next step, of these those whose last one is
    longest ago."""

    def __init__(self, options: LoraOptions, *, by_priority: bool = False) -> None:
        self._most, self._by_priority = options.most_in_step, by_priority
        self.held = options.most if options.enable_lora else 0
        """How many adapters the workers hold at most; 0: requests may name none."""
        self._step = 0
        self._last: dict[int, int] = {}
        """Adapter -> the step that it was in last."""
        self._passed: dict[int, tuple[int, int]] = {}
        """Adapter -> the best rank of sequences of it that wait for room in steps, and the step since which
        some have."""
        self._taken: set[int] = set()
        self._left = self._most

    def rank_of(self, request: Add) -> int:
        """The rank of a request among those for other adapters, of which the lowest comes first."""
        return request.priority if self._by_priority else 0

    def begin_step(self, running: Iterable[Sequence]) -> None:
        """Choose among those of running sequences. What is left is for whichever comes first."""
        self._step += 1
        wanted: dict[int, int] = {}
        for seq in running:
            if seq.adapter:
                rank = self.rank_of(seq.request)
                wanted[seq.adapter] = min(rank, wanted.get(seq.adapter, rank))
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

    def may_have(self, seq: Sequence) -> bool:
        """Whether there is room for the adapter of a sequence."""
        adapter = seq.adapter
        if not adapter or adapter in self._taken or self._left:
            return True
        rank, since = self._passed.get(adapter, (self.rank_of(seq.request), self._step))
        self._passed[adapter] = min(rank, self.rank_of(seq.request)), since
        return False

    def take(self, seq: Sequence) -> None:
        """Note that a sequence gets a row."""
        if (adapter := seq.adapter) and adapter not in self._taken:
            self._taken.add(adapter)
            self._last[adapter] = self._step
            self._passed.pop(adapter, None)
            self._left -= 1


def begin_adapter(seq: Sequence, adapters: AdapterTable) -> None:
    """Have a sequence use the adapter of its request, if that computes anything of it."""
    request = seq.request
    if not request.adapter:
        return
    first = adapters.first_position(request.adapter, request.tokens[: seq.prompt_len])
    if first is None:
        seq.request = replace(request, adapter="")  # and it shares what the model alone computes
        return
    seq.adapter, seq.adapter_from = adapters.begin(request.adapter), first
