"""Drafts, the guesses for one sequence in one step: when they are added, and what becomes of them.

Guesses are added to steps that only decode, behind tokens that are all known. How many of them hold is known
when their step has landed, and until then no other one is planned. Only a model in several stages has others
in flight meanwhile: they are for other sequences, as each waits for its token anyway.

A guess takes memory from nobody: it gets blocks that are free, and leaves some for the others.

If there is a drafter, its guesses come when a step lands that asked for them, and are those of the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from engine_core.config import EngineConfig
from engine_core.engine_stats import GuessTotals
from engine_core.grammar.guess_bounds import count_fitting
from engine_core.guess_options import read_guess_options
from engine_core.scheduling.cache.cache_manager import CacheManager
from engine_core.scheduling.guesses.guesser import Guesser
from engine_core.scheduling.guesses.model_guesser import ModelGuesser
from engine_core.scheduling.pace import Pace
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_builder import PlannedStep, StepBuilder
from engine_core.scheduling.step_cost import READ
from worker.worker_facts import WorkerFacts

_log = logging.getLogger(__name__)


def make_drafts(config: EngineConfig, facts: WorkerFacts, pace: Pace, cache: CacheManager) -> Drafts | None:
    """What adds guesses to steps, unless nobody wants them or the model takes none."""
    options, asked = read_guess_options(config), bool(config.speculative_config)
    if options is None or (
        not asked and facts.device != "cpu"
    ):  # elsewhere nobody has measured that it gains
        return None
    if not facts.most_rows:
        if asked:
            _log.warning(
                "no tokens are guessed: models that generate no text take none, nor do models that keep "
                "states on GPUs, with experts shared by replicas, or in stages with --kv-cache-dir"
            )
        return None
    if options.rates:
        _log.warning("guesses hold by chance (rejection_sample_method synthetic): answers mean nothing")
    pace.most_tokens = 1 + options.most
    guesser = (ModelGuesser if facts.drafts else Guesser)(options, facts, pace.line)
    return Drafts(guesser, facts, pace, cache, staged=config.pipeline_parallel_size > 1)


class Drafts:
    def __init__(
        self,
        guesser: Guesser | ModelGuesser,
        facts: WorkerFacts,
        pace: Pace,
        cache: CacheManager,
        *,
        staged: bool,
    ) -> None:
        """`staged`: several steps are in flight, of different sequences, none of which waits for another."""
        self._guesser = guesser
        self._drafter = guesser if isinstance(guesser, ModelGuesser) else None
        self._most_rows = facts.most_rows
        self._pace = pace
        self._cache = cache
        self._staged = staged
        self._followed: set[Sequence] = set()
        """The sequences whose tokens the guesser is told."""

    @property
    def totals(self) -> GuessTotals:
        return self._guesser.totals

    def wait(self, seqs: Collection[Sequence], *, newcomers: bool) -> bool:
        """Whether the next step, of these sequences, is not planned before all in flight have landed.

        `newcomers`: whether it may be for others, too, for which it is not delayed unless it must be.
        """
        newest = self._pace.newest
        if self._staged or newest is None:
            return False
        if newest.guessed:
            return True
        return not newcomers and newest.is_decoding and (newest.proposes or self._guesser.pays(seqs))

    def add(self, step: StepBuilder, running: int, *, may_grow: bool) -> None:
        """Add guesses to a step that has all other rows, while so many sequences run.

        `may_grow`: whether they may have new blocks, because no sequence waits for memory.
        """
        seqs = step.decoding
        if not seqs or any(seq.in_flight > 1 for seq in seqs):
            return
        most = min(self._most_rows, len(seqs) + step.room_for_guesses)
        if most <= len(seqs):
            return
        chosen = self._guesser.choose(seqs, most)
        lengths = {} if self._drafter is None else self._drafter.lengths(seqs)
        spared = running if may_grow else self._cache.pool.free
        grow = self._cache.grow_for_guesses
        for at, seq in enumerate(seqs):
            if seq not in chosen and seq not in lengths:
                continue
            guesses, held = chosen.get(seq, [])[: seq.left - 1], len(seq.tables[0])
            if guesses and seq.matcher is not None:
                guesses = guesses[: count_fitting(seq.matcher, guesses)]
            if guesses:
                guesses = guesses[: grow(seq, len(guesses), spared)]
            proposes = max(0, min(lengths.get(seq, 0), seq.left - 2 - len(guesses)))
            if proposes:
                proposes = grow(seq, len(guesses) + proposes, spared) - len(guesses)
            if guesses or proposes:
                keeps = self._cache.keep_guessed(seq, len(guesses))
                step.guess(at, guesses, len(seq.tables[0]) - held, proposes, keeps)

    def learn(self, planned: PlannedStep, seconds: float, proposing: float) -> None:
        """Learn from a step that has landed how long it took, and how long the drafter took behind it."""
        if planned.is_decoding:
            self._guesser.learn(planned.tokens, int(planned.work[READ]), seconds)
        if self._drafter is not None and proposing:
            lengths = [row.proposes for row in planned.step.seqs if row.proposes]
            self._drafter.learn_proposing(lengths, proposing)

    def offer(self, seq: Sequence, guesses: list[int]) -> None:
        """Take the drafter's guesses behind the last token of a sequence, unless the next one is planned."""
        if self._drafter is not None and not seq.pending:
            self._drafter.offer(seq, guesses)

    def settle(self, seq: Sequence, guessed: int, held: int) -> None:
        """Note what became of the guesses for a sequence."""
        self._guesser.landed(seq, guessed, held)
        seq.owner.used[seq.work_class] += held * seq.owner.per_token
        if seq.request.reports_guesses:
            seq.drafts.append((guessed, held))

    def follow(self, seq: Sequence, count: int) -> None:
        """Note that the last `count` tokens of a sequence are new."""
        if seq in self._followed:
            self._guesser.follow(seq, count)
        else:
            self._followed.add(seq)
            self._guesser.enter(seq)

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        if seq in self._followed:
            self._followed.remove(seq)
            self._guesser.leave(seq)
