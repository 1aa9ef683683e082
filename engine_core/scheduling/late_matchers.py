"""Sequences whose matcher is late: they sit steps out until it is known what may come next, or are ended.

The steps in flight are void for such a sequence, as for one that was preempted. Others go on.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_core.grammar.matcher import GrammarError
from engine_core.protocol import Failed, OutputsByClient, Tokens
from engine_core.scheduling.queue.waiting import PausedSequences
from engine_core.scheduling.sequence import Sequence

_LOOK_AGAIN = 0.1
"""The seconds after which late matchers are looked at, though none has said that it is done."""


class LateMatchers:
    def __init__(
        self, paused: PausedSequences, preempt: Callable[[Sequence], None], end: Callable[[Sequence], None]
    ) -> None:
        self._paused = paused
        self._preempt = preempt
        self._end = end
        self._resumes: dict[Sequence, bool] = {}
        """The sequences, and whether each goes on by itself: its reader has not paused it before."""

    def __len__(self) -> int:
        return len(self._resumes)

    def next_look(self, now: float) -> float | None:
        """The time by which `settle` must be called."""
        return now + _LOOK_AGAIN if self._resumes else None

    def add(self, seq: Sequence) -> None:
        """Leave a sequence out of steps, and drop what steps in flight bring for it. One that runs apart is
        computed again instead, because nobody else runs meanwhile."""
        self._resumes.setdefault(seq, not seq.paused)
        self._paused.pause([seq.key])
        if seq.slot is not None:
            self._preempt(seq)

    def settle(self, now: float, *, wait: bool) -> OutputsByClient:
        """Let those go on whose matcher is done. Those that have become complete meanwhile, or took longer
        than they may, end. With `wait`, wait a while for the first one."""
        outputs: OutputsByClient = {}
        for seq, resumes in list(self._resumes.items()):
            if (matcher := seq.matcher) is None or seq.done:
                del self._resumes[seq]
                if matcher is not None:
                    matcher.abandon()
                continue
            answer: Tokens | Failed | None = None
            try:
                if not matcher.settle(_LOOK_AGAIN if wait else 0.0):
                    continue
                finish = "stop" if matcher.complete else "length" if len(seq.tokens) >= seq.limit else None
                if finish is not None:
                    timing, guesses = seq.timing(now), seq.guess_report
                    answer = Tokens(id=seq.id, tokens=[], finish=finish, timing=timing, guesses=guesses)
            except GrammarError as error:
                answer = Failed(id=seq.id, code=400, message=str(error))
            del self._resumes[seq]
            wait = False
            if answer is not None:
                self._end(seq)
                outputs.setdefault(seq.key[0], []).append(answer)
            elif resumes:
                self._paused.take_out([seq])
        return outputs
