"""Drafts, the guesses for one sequence in one step: when they are added, and what becomes of them.

Guesses are added to steps that only decode, behind tokens that are all known. How many of them hold is known
when their step has landed, and until then no other one is planned. Only a model in several stages has others
in flight meanwhile: they are for other sequences, as each waits for its token anyway.

A guess takes memory from nobody: it gets blocks that are free, and leaves some for the others.

If there is a drafter, its guesses come when a step lands that asked for them, and are those of the next one.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.engine_stats import GuessReport, GuessTotals, Stats
from engine_core.features.speculation.model_speculator import ModelSpeculator
from engine_core.features.speculation.speculator import Speculator
from engine_core.options.speculation_options import read_guess_options
from engine_core.protocol import Tokens
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Place, Sequence
from worker.protocol import StepOutput
from worker.worker_facts import WorkerFacts

_log = logging.getLogger(__name__)


def make_drafts(config: EngineConfig, facts: WorkerFacts, core: Scheduler) -> Drafts | None:
    """Make what adds guesses to steps, unless nobody wants them or the model takes none."""
    options, asked = read_guess_options(config), bool(config.speculative_config)
    if options is None or (
        not asked and facts.device != "cpu"
    ):  # elsewhere nobody has measured that it gains
        return None
    if not facts.most_rows:
        if asked:
            _log.warning(
                "no speculation: it is not there for models that generate no text, nor for models that keep "
                "states on GPUs, with experts shared by replicas, or in stages with --kv-cache-dir"
            )
        return None
    core.pace.most_tokens = 1 + options.most

    def forced(seq: Sequence) -> list[int]:
        return [token for hook in core.hooks.forced for token in hook(seq)]

    step_time = core.pace.step_time
    guesser = (
        ModelSpeculator(options, facts, step_time)
        if facts.drafts
        else Speculator(options, facts, step_time, forced)
    )
    return Drafts(guesser, facts, core, staged=config.pipeline_parallel_size > 1)


class Drafts(Feature):
    def __init__(
        self, guesser: Speculator | ModelSpeculator, facts: WorkerFacts, core: Scheduler, *, staged: bool
    ) -> None:
        """`staged`: several steps are in flight, of different sequences, none of which waits for another."""
        self._guesser = guesser
        self._drafter = guesser if isinstance(guesser, ModelSpeculator) else None
        self._most_rows = facts.most_rows
        self._core = core
        self._staged = staged
        self._known: dict[Sequence, int] = {}
        """The sequences whose tokens the guesser is told, and how many it knows."""
        self._reports: dict[Sequence, GuessReport] = {}
        """What became of guesses for the sequences whose requests ask for that."""

    def waits_for_landing(self) -> bool:
        """Say whether the next step is not planned before it is known which guesses of the last one hold.

        Nor is it if it may get some; but where newcomers may be in it, it is not delayed for that.
        """
        in_flight = self._core.pace.in_flight
        if self._staged or not in_flight:
            return False
        newest = in_flight[-1]
        if not newest.is_decoding:
            return False
        if newest.tokens > len(newest.seqs):
            return True
        if self._core.may_admit:
            return False
        proposes = self._drafter is not None and any(row.proposes for row in newest.step.seqs)
        return proposes or self._guesser.pays(self._core.runnable())

    def complete(self, step: StepBuilder) -> None:
        """Add guesses to a step that only decodes and has all other rows."""
        seqs = step.decoding
        for seq in seqs:
            if seq.in_flight > 1:
                return
        most = min(self._most_rows, len(seqs) + step.room)
        if not seqs or most <= len(seqs):
            return
        chosen = self._guesser.choose(seqs, most)
        lengths = {} if self._drafter is None else self._drafter.lengths(seqs)
        cache = self._core.cache
        spared = cache.pool.free if self._core.cache_full else len(self._core.running)
        for at, seq in enumerate(seqs):
            if seq in chosen or seq in lengths:
                self._add(step, at, seq, chosen.get(seq, []), lengths.get(seq, 0), spared)

    def _add(
        self, step: StepBuilder, at: int, seq: Sequence, guesses: list[int], proposes: int, spared: int
    ) -> None:
        """Add as many of these guesses to a row as have room, and have the drafter make so many others."""
        cache, held, guesses = self._core.cache, len(seq.tables[0]), guesses[: seq.left - 1]
        if guesses and seq.is_followed:
            for fitting in self._core.hooks.fitting:
                guesses = guesses[: fitting(seq, guesses)]
        if guesses:
            guesses = guesses[: cache.grow_if_spare(seq, len(guesses), spared)]
        proposes = max(0, min(proposes, seq.left - 2 - len(guesses)))
        if proposes:
            proposes = cache.grow_if_spare(seq, len(guesses) + proposes, spared) - len(guesses)
        if not (guesses or proposes):
            return
        step.extend(at, len(guesses), len(seq.tables[0]) - held, guesses=guesses)
        if proposes:
            step.change_row(at, proposes=proposes)

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        """Learn how long the drafter took, and tell the guesser the new tokens of its sequences."""
        if self._drafter is not None and output.proposing:
            lengths = [row.proposes for row in planned.step.seqs if row.proposes]
            self._drafter.learn_proposing(lengths, output.proposing)
        drafts = output.drafts
        for seq, row in zip(planned.seqs, planned.step.seqs, strict=True):
            if row.samples and not seq.done:
                is_there = seq.place is Place.RUNNING and seq.slot == row.slot
                self._follow(seq, drafts.get(row.slot) if drafts and is_there else None)

    def _follow(self, seq: Sequence, draft: list[int] | None) -> None:
        """Tell the guesser what is new of a sequence, and the drafter's guesses of what follows."""
        count, known = len(seq.tokens), self._known.get(seq)
        if count == (seq.prompt_len if known is None else known):
            return  # its outcome was not wanted
        if known is None:
            self._guesser.enter(seq)
        else:
            self._guesser.follow(seq, count - known)
        self._known[seq] = count
        if draft and self._drafter is not None and not seq.pending:  # else the next one is planned
            self._drafter.offer(seq, draft)

    def arrive(self, planned: PlannedStep, output: StepOutput) -> None:
        """Note what became of guesses, before answers are told that."""
        number, failed = planned.step.number, output.failed
        for seq, row in zip(planned.seqs, planned.step.seqs, strict=True):
            if row.guesses and seq.wants(number) and row.slot not in failed:
                self._settle(seq, len(row.guesses), len(output.held.get(row.slot, ())))

    def _settle(self, seq: Sequence, guessed: int, held: int) -> None:
        self._guesser.landed(seq, guessed, held)
        seq.owner.used[seq.work_class] += held * seq.owner.per_token
        if seq.request.reports_guesses:
            report = self._reports.setdefault(seq, GuessReport([], []))
            report.guessed.append(guessed)
            report.held.append(held)

    def report(self, seq: Sequence, answer: Tokens) -> Tokens:
        if not seq.request.reports_guesses:
            return answer
        found = self._reports.get(seq)
        return replace(
            answer, guesses=GuessReport([*found.guessed], [*found.held]) if found else GuessReport([], [])
        )

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._reports.pop(seq, None)
        if (known := self._known.pop(seq, None)) is not None:
            if count := len(seq.tokens) - known:
                self._guesser.follow(seq, count)
            self._guesser.leave(seq)

    @property
    def totals(self) -> GuessTotals:
        return self._guesser.totals

    def add_stats(self, stats: Stats) -> Stats:
        return replace(stats, guesses=self.totals)
