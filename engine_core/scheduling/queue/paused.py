"""The sequences whose readers do not keep up.

They are in no step, so that nothing is computed for nobody. Those that run keep their slots and blocks, which
are the first to be taken when another sequence needs them; the others do not wait for any meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine_core.scheduling.queue.waiting import WaitingQueue, order
from engine_core.scheduling.sequence import Key, Sequence


class PausedSequences(set[Sequence]):
    def __init__(self, live: Mapping[Key, Sequence], waiting: WaitingQueue) -> None:
        """`live` are all sequences of the engine, and `waiting` those that wait for a slot."""
        super().__init__()
        self._live = live
        self._waiting = waiting

    def pause(self, keys: Iterable[Key]) -> None:
        """Leave these out of steps until `resume`. Those that have ended, or run apart, are passed over."""
        for key in keys:
            seq = self._live.get(key)
            if seq is None or seq.paused or seq.apart:
                continue
            seq.paused = True
            self.add(seq)
            if seq.slot is None:
                self._waiting.remove(seq)

    def resume(self, keys: Iterable[Key]) -> None:
        self.take_out([self._live[key] for key in keys if key in self._live])

    def take_out(self, seqs: Iterable[Sequence]) -> None:
        """Let sequences go on, if they were paused."""
        for seq in seqs:
            if seq.paused:
                seq.paused = False
                self.discard(seq)
                if seq.slot is None:
                    self._waiting.add(seq)

    def victim(self) -> Sequence | None:
        """The sequence that is preempted next for one that is not paused, if one can be."""
        able = [seq for seq in self if seq.slot is not None and not seq.in_flight]
        return max(able, key=order, default=None)
