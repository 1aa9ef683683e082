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

from engine_core.protocol import ALONE_TOKENS, Alone, OutputsByClient
from engine_core.scheduling.sequence import Key, Sequence
from engine_core.scheduling.step_builder import PlannedStep

_TOLD_BEFORE = 0.02
"""The seconds from telling a server that its request runs alone to its first step, and from its last tokens
to the next step with others: the message must have left this process, which may end in that step."""


class Suspects:
    """The sequences that run apart, in groups of which one runs at a time."""

    def __init__(self) -> None:
        self.groups: deque[list[Sequence]] = deque()
        """The first group runs, while there is one."""
        self._unannounced: set[Key] = set()
        """Requests that are to run alone, and whose servers do not know yet that they do."""
        self._told: float | None = 0.0
        """When a server was told last that its request runs alone, or does no more; None: in this moment."""
        self._alone: Key | None = None
        self.settling = False
        """Whether the last tokens of a request that ran alone may still be on their way to its server."""

    def isolate(self, seq: Sequence) -> None:
        """Let a sequence that has just come run alone, after those that came before it."""
        seq.apart = ALONE_TOKENS
        self.groups.append([seq])
        self._unannounced.add(seq.key)

    def divide(self, planned: PlannedStep, suspects: list[Sequence]) -> None:
        """Let these sequences of a step that failed run in two groups."""
        for seq in suspects:
            self.remove(seq)
            seq.apart = 1
        entered = {new.slot for new in planned.step.new}
        rows = zip(planned.seqs, planned.step.seqs, strict=True)
        came = {seq.key for seq, row in rows if row.slot in entered}
        first = [seq for seq in suspects if seq.key in came]
        second = [seq for seq in suspects if seq.key not in came]
        if not first or not second:
            half = len(suspects) // 2
            first, second = suspects[:half], suspects[half:]
        self.groups.extendleft(group for group in (second, first) if group)

    def acquit(self, seq: Sequence) -> None:
        """Note that a sequence that runs apart has got a token. With enough of them it is no suspect."""
        seq.apart -= 1
        if not seq.apart:
            self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Let a sequence run with all others again, or end."""
        seq.apart = 0
        self._unannounced.discard(seq.key)
        if seq.key == self._alone:
            self._alone, self._told, self.settling = None, None, True
        for group in self.groups:
            if seq in group:
                group.remove(seq)
        self.groups = deque(group for group in self.groups if group)

    def announce(self, now: float) -> OutputsByClient:
        """Tells a server that its request runs alone from now on, if one must know. No step is in flight."""
        if not self.groups or self.groups[0][0].key not in self._unannounced:
            return {}
        client, id = self._alone = self.groups[0][0].key
        self._unannounced.remove((client, id))
        self._told = now
        return {client: [Alone(id=id)]}

    def may_begin(self, now: float) -> bool:
        """Whether a step may begin: servers know which request runs alone, and how far others came."""
        if self._told is None:
            self._told = now
        if (self.groups and self.groups[0][0].key in self._unannounced) or now < self._told + _TOLD_BEFORE:
            return False
        self.settling = False
        return True
