"""Chooses where states are remembered: what a hybrid's layers keep of a sequence, behind some of its blocks.

A cached prefix of such a model ends where both are there: all its blocks, and the state behind the last one.
There are few places for states (`cache/state_pool.py`), so they are filled where prompts are likely to go on:
at the end of the first turn, which is the system prompt of a conversation; at the end of the blocks that are
known, where this prompt leaves another; at that of a prompt to be answered, for the next turn; and at that of
the answer, while it grows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.scheduling.cache.cache_manager import CacheManager
from engine_core.scheduling.cache.state_pool import StatePool
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.sequence import Sequence
from models.state_rows import MOST_KEPT
from worker.protocol import NewSeq, Sampling, SeqStep, StepOutput


@dataclass(slots=True)
class _Own:
    """The states of a sequence that runs."""

    source: int = -1
    """The place of the remembered state from which its next step goes on, if it does."""
    ends: list[int] = field(default_factory=list[int])
    """The numbers of leading tokens after which its state is to be remembered."""


class PrefixStates(Feature):
    def __init__(self, cache: CacheManager, pool: StatePool) -> None:
        self._cache, self.pool, self._block_size = cache, pool, cache.block_size
        self._own: dict[Sequence, _Own] = {}
        """Sequences that run."""
        self._newest: dict[Sequence, bytes] = {}
        """The name of the newest state of each answer."""
        self._ended: list[Sequence] = []
        """Sequences that have ended, of which the step that lands now may still bring a state."""
        cache.may_end = pool.__contains__

    def begin_step(self) -> None:
        self.pool.begin_step()

    def admit(self, seq: Sequence, new: NewSeq, step: StepBuilder) -> NewSeq:
        """Let a sequence that is admitted go on from a state, and choose where others are remembered."""
        size, own = self._block_size, _Own()
        self._own[seq] = own
        if seq.computed:
            own.source = self.pool.read(seq.block_hash(seq.computed // size - 1, size))
        ends = [self._cache.known_tokens(seq)]
        if isinstance(seq.request.params, Sampling):
            ends += [len(seq.tokens), _first_turn(seq.tokens, seq.request.params.stop_token_ids)]
        own.ends = sorted({end - end % size for end in ends if end - end % size > seq.computed})
        return new

    def finish(self, step: StepBuilder) -> None:
        """Tell from which states rows go on, and where they keep others; last of all those behind guesses."""
        for at, (seq, row) in enumerate(zip(step.seqs, step.rows, strict=True)):
            own = self._own[seq]
            kept = self._plan(seq, row, own.ends)
            if kept or own.source >= 0:
                step.change_row(at, source=own.source, kept=kept)
                own.source = -1
        for at, row in enumerate(step.rows):
            if row.guesses and (kept := self._plan_guessed(row)):
                step.change_row(at, kept=(*row.kept, *kept))

    def _plan(self, seq: Sequence, row: SeqStep, ends: list[int]) -> tuple[tuple[int, int], ...]:
        """The states that a row keeps, without those behind its guesses, and the places that they get."""
        start, end = row.start, row.start + row.count
        wanted = [each for each in ends if start < each <= end]
        newest = end - end % self._block_size
        if start >= seq.prompt_len and newest > start and newest not in wanted:
            wanted.append(newest)
        kept: list[tuple[int, int]] = []
        for each in wanted[-MOST_KEPT:]:
            if (place := self.pool.take()) is not None:
                kept.append((each - start, place))
        return tuple(kept)

    def _plan_guessed(self, row: SeqStep) -> tuple[tuple[int, int], ...]:
        """The end of the last block that would be full if all guesses hold, and a place for its state."""
        known = row.start + row.count
        newest = known + len(row.guesses)
        newest -= newest % self._block_size
        place = self.pool.take() if newest > known else None
        return () if place is None else ((newest - row.start, place),)

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        for seq, row in zip(planned.seqs, planned.step.seqs, strict=True):
            if row.kept:
                self._land(seq, row, wanted=row.slot not in planned.dropped)
        for seq in self._ended:
            self._newest.pop(seq, None)
        self._ended.clear()

    def fail_step(self, planned: PlannedStep, again: list[Sequence], behind: bool) -> None:
        for seq, row in zip(planned.seqs, planned.step.seqs, strict=True):
            self._land(seq, row, wanted=False)

    def _land(self, seq: Sequence, row: SeqStep, *, wanted: bool) -> None:
        """Let others find what a landed row has kept, or take the places back if its outcome is not wanted.

        A state behind guesses that do not hold was not kept. While an answer grows, its newest state takes
        the place of the one before.
        """
        for count, place in row.kept:
            if not wanted or row.start + count > seq.computed:
                self.pool.give_back(place)
                continue
            hash = seq.block_hash((row.start + count) // self._block_size - 1, self._block_size)
            self.pool.put(hash, place, is_filled=True)
            if self.pool.published is not None:
                self.pool.published[hash] = None
            if row.start >= seq.prompt_len:
                if (before := self._newest.get(seq, hash)) != hash:
                    self.pool.forget(before)
                self._newest[seq] = hash

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that runs no more, but not its states."""
        self._own.pop(seq, None)

    def leave(self, seq: Sequence) -> None:
        self._ended.append(seq)

    def forget_prefixes(self) -> None:
        self.pool.forget_all()


def _first_turn(tokens: list[int], ends: tuple[int, ...]) -> int:
    """The tokens of the first turn, 0 if there is none: chat templates end each turn as answers end."""
    return next((index + 1 for index, token in enumerate(tokens) if token in ends), 0)
