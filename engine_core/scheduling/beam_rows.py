"""The rows of beam searches in steps: where their answers lie, and what becomes of them when a step lands.

A search is one sequence for the scheduler: it waits, runs, gives way and ends as a whole, and has a slot for
each answer that it follows. While its prompt is computed it is like any other. Then it has a row for each
answer in a step, or in several where they do not fit, and its next tokens are chosen when all have landed.

Answers share the blocks that they have in common. Of one that goes on in several ways, the likeliest keeps
its slot and its blocks; the others get a copy of the last block if that is not full. A search that gives way
begins again with its prompt, and finds the same.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_core.beams.beam_search import BeamSearch, Continuation, LiveBeam
from engine_core.protocol import Tokens
from engine_core.scheduling.cache.cache_manager import CacheManager
from engine_core.scheduling.pace import Pace
from engine_core.scheduling.queue.failed_steps import Suspects
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import StepBuilder
from worker.protocol import BeamToken, TokenLogprobs

Grow = Callable[[Sequence, int], list[int] | None]
"""The type of a function that gives a sequence blocks for so many positions -> these, or None."""


class BeamRows:
    def __init__(self, cache: CacheManager, pace: Pace, suspects: Suspects, block_size: int) -> None:
        self._cache = cache
        self._pace = pace
        self._suspects = suspects
        self._block_size = block_size

    def plan(self, seq: Sequence, search: BeamSearch, step: StepBuilder, grow: Grow) -> float:
        """Add rows for the answers that are in no step yet, as many as fit -> the seconds that they take.

        There are none while the end of the prompt is in flight.
        """
        if not search.beams:
            return 0.0
        cost, at = 0.0, len(seq.tokens) - 1
        for beam in sorted(search.beams, key=_goes_on_there):  # others take what it has before it changes
            if beam.is_planned:
                continue
            seq.tables, seq.computed = beam.tables, at
            if not step.budget or (gained := grow(seq, at + 1)) is None:
                break
            copies = list(zip(beam.copied, gained, strict=True)) if beam.copied else []
            row = BeamToken(beam.slot, beam.source, at, beam.tokens[-1], copies)
            cost += step.add_beam(seq, row, gained)
            seq.owner.used[seq.work_class] += seq.owner.per_token
            beam.is_planned = True
        _set_gap(seq, search)
        return cost

    def land(
        self, seq: Sequence, search: BeamSearch, slot: int, entry: TokenLogprobs | None, now: float
    ) -> Tokens | None:
        """Take what may follow the answer in a slot -> the output of the request, if the search is over."""
        if not search.beams:
            search.begin(slot, seq.tables)
            if seq.first_token is None:
                seq.first_token = now
                self._pace.begin_decoding(seq)
        next(beam for beam in search.beams if beam.slot == slot).found = entry
        if search.waits:
            seq.steps -= 1  # a step counts once, whatever its rows
            _set_gap(seq, search)
            return None
        if seq.apart:
            self._suspects.acquit(seq)
        following = search.choose()
        if not search.is_over(following):
            self._follow(seq, search, following)
            return None
        found = search.end(following)
        return Tokens(
            id=seq.id,
            tokens=[],
            cached=seq.cached,
            finish=found[0].finish,
            timing=seq.timing(now),
            expected=seq.expected,
            beams=found,
        )

    def _follow(self, seq: Sequence, search: BeamSearch, following: list[Continuation]) -> None:
        """Let a search go on with these answers, and give up what others of them held."""
        goes_on = {continuation.beam for continuation in following}
        for beam in search.beams:
            if beam not in goes_on:
                self._cache.release_tables(beam.tables)
                search.spare_slots.append(beam.slot)
        shared, filled = divmod(seq.prompt_len + len(search.beams[0].tokens), self._block_size)
        beams: list[LiveBeam] = []
        for before, token, total in following:
            beam = LiveBeam(before.slot, before.tables, before.slot)
            beam.tokens, beam.total = [*before.tokens, token], total
            beam.logprobs = search.logprobs_of(before, token)
            if before in goes_on:
                goes_on.remove(before)
            else:
                beam.slot = search.spare_slots.pop()
                beam.tables = self._cache.share_tables(before.tables, shared)
                beam.copied = [table[shared] for table in before.tables] if filled else []
            beams.append(beam)
        search.beams = beams
        seq.tokens[seq.prompt_len :] = beams[0].tokens
        seq.published = shared  # blocks of answers are not published, as most of them are given up
        _set_gap(seq, search)


def _set_gap(seq: Sequence, search: BeamSearch) -> None:
    """Let the sequence have one token to compute while an answer is in no step, and else none."""
    seq.computed = len(seq.tokens) + seq.pending - search.lacks_rows


def _goes_on_there(beam: LiveBeam) -> bool:
    return beam.source == beam.slot
