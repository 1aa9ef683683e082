"""Sequences that may be what makes steps fail: they run apart from all others until it is known which one is.

When a step fails, its sequences are divided in two groups: those that came with this step and those that had
run before, or else two halves. Each group has steps of its own, one at a time, while all others wait. A group
whose step fails is divided in turn, and a sequence that fails alone is to blame. One that gets a token is
not, as it has passed the place at which the step failed.

A server has a request run alone if engines have ended while they computed it. It is told when that begins, so
that it knows what to blame if this engine ends too, and the request runs apart until it has a few tokens.
"""

from __future__ import annotations

from collections import deque

from engine_core.protocol import ALONE_TOKENS, OutputsByClient, RunsAlone
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Key, Sequence
from worker.protocol import StepOutput

_TOLD_BEFORE = 0.02
"""The seconds from telling a server that its request runs alone to its first step, and from its last tokens
to the next step with others: the message must have left this process, which may end in that step."""


class Suspects(Feature):
    """Keeps groups of sequences of which one runs at a time, while there are any."""

    asked_by = ("alone",)

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._groups: deque[list[Sequence]] = deque()
        """The first group runs, while there is one."""
        self._apart: dict[Sequence, int] = {}
        """The number of tokens with which each sequence that runs apart runs with all others again."""
        self._unannounced: set[Key] = set()
        """Requests that are to run alone, and whose servers do not know yet that they do."""
        self._told: float | None = 0.0
        """When a server was told last that its request runs alone, or does no more; None: in this moment."""
        self._alone: Key | None = None
        self._settling = False
        """Whether the last tokens of a request that ran alone may still be on their way to its server."""

    def enter(self, seq: Sequence) -> None:
        """Let a new sequence run alone after those that came before it, if its server asks for that."""
        if seq.request.alone:
            self._apart[seq] = len(seq.tokens) + ALONE_TOKENS
            self._groups.append([seq])
            self._unannounced.add(seq.key)
            self._choose()

    def leave(self, seq: Sequence) -> None:
        if seq in self._apart:
            self._remove(seq)

    def may_pause(self, seq: Sequence) -> bool:
        return seq not in self._apart

    def may_begin(self, now: float) -> bool:
        """Say whether servers know which request runs alone, and how far others came."""
        if self._told is None:
            self._told = now
        if (self._groups and self._groups[0][0].key in self._unannounced) or now < self._told + _TOLD_BEFORE:
            return False
        self._settling = False
        self._choose()
        return True

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        """Let sequences that have got enough tokens run with all others again."""
        for seq in planned.seqs:
            if len(seq.tokens) >= self._apart.get(seq, len(seq.tokens) + 1):
                self._remove(seq)

    def fail_step(self, planned: PlannedStep, again: list[Sequence], behind: bool) -> None:
        """Divide the sequences of a step that failed, but not behind another, in two groups."""
        if behind:
            return
        for seq in again:
            self._remove(seq)
            self._apart[seq] = len(seq.tokens) + 1
        entered = {new.slot for new in planned.step.new}
        rows = zip(planned.seqs, planned.step.seqs, strict=True)
        came = {seq.key for seq, row in rows if row.slot in entered}
        first = [seq for seq in again if seq.key in came]
        second = [seq for seq in again if seq.key not in came]
        if not first or not second:
            half = len(again) // 2
            first, second = again[:half], again[half:]
        self._groups.extendleft(group for group in (second, first) if group)
        self._choose()

    def poll(self, now: float, in_flight: int) -> OutputsByClient:
        """Tell a server, once no step is in flight, that its request runs alone from now on."""
        if in_flight or not self._groups or self._groups[0][0].key not in self._unannounced:
            return {}
        client, id = self._alone = self._groups[0][0].key
        self._unannounced.remove((client, id))
        self._told = now
        return {client: [RunsAlone(id=id)]}

    def _remove(self, seq: Sequence) -> None:
        self._apart.pop(seq, None)
        self._unannounced.discard(seq.key)
        if seq.key == self._alone:
            self._alone, self._told, self._settling = None, None, True
        for group in self._groups:
            if seq in group:
                group.remove(seq)
        self._groups = deque(group for group in self._groups if group)
        self._choose()

    def _choose(self) -> None:
        self._core.only = self._groups[0] if self._groups else []
        if self._groups or self._settling:
            self._core.hooks.wake(self)
        else:
            self._core.hooks.rest(self)
