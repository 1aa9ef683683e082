"""Takes the guesses of a drafter, a model beside the served one, and says how many it shall make."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from engine_core.engine_stats import GuessTotals
from engine_core.features.speculation.ngram_lookup import STRONGEST
from engine_core.features.speculation.speculator import Acceptance, AcceptanceRecord, DraftCounts
from engine_core.options.speculation_options import SpeculationOptions
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_time_model import StepTime
from worker.worker_facts import WorkerFacts

_FIRST_RATE = 0.6
"""The rate at which guesses are believed to hold before any was made, if all before them do."""
_LEAST_CHANCE = 0.05
_WORTH = 0.02
"""The least gain, as a part of the tokens per second, for which guesses are made."""
_FADING = 0.2
_TRIED_AGAIN, _TRIAL = 100, 2
"""After so many steps without guesses, so many are made to see whether they pay by now."""


@dataclass(slots=True)
class _Drafted:
    """The drafts of one sequence."""

    most: int
    record: AcceptanceRecord = field(default_factory=AcceptanceRecord)
    draft: list[int] = field(default_factory=list[int])
    """The drafter's guesses of its next tokens."""


class ModelSpeculator:
    """Decides by the time that a drafter takes, and by how often its guesses hold, when it guesses."""

    def __init__(self, options: SpeculationOptions, facts: WorkerFacts, step_time: StepTime) -> None:
        self._options = options
        self._most = min(options.most, facts.drafts)
        self._most_rows = facts.most_rows
        self._acceptance = Acceptance([_FIRST_RATE] * (STRONGEST + 1))
        """How often a guess holds by its place in a draft, if all before it do."""
        self.step_time = step_time
        self._seconds: dict[int, float] = {}
        """The bits of a number of sequences -> the seconds of one guess for each of so many."""
        self._drafted: dict[Sequence, _Drafted] = {}
        self._moved = True
        """Whether anything has changed since `_lengths` was computed."""
        self._lengths: dict[Sequence, int] = {}
        self._asked: list[Sequence] = []
        self._without = 0
        """The steps since the last one for which guesses were made."""
        self._counts = DraftCounts(self._most)

    @property
    def totals(self) -> GuessTotals:
        return self._counts.totals

    def enter(self, seq: Sequence) -> None:
        """Begin with a sequence that has its first token."""
        asked, most = seq.request.most_guesses, self._most
        if most := most if asked is None else min(most, asked):
            self._drafted[seq] = _Drafted(most)
        self._moved = True

    def follow(self, seq: Sequence, count: int) -> None:
        """Forget the guesses for a sequence, whose last `count` tokens are new."""
        self._moved = True
        if (drafted := self._drafted.get(seq)) is not None:
            drafted.draft = []

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._drafted.pop(seq, None)

    def offer(self, seq: Sequence, guesses: list[int]) -> None:
        """Take the drafter's guesses of what follows the last token of a sequence."""
        if (drafted := self._drafted.get(seq)) is not None:
            drafted.draft = guesses

    def pays(self, seqs: Collection[Sequence]) -> bool:
        """Whether guesses are to be made in the next step, for which it must not be planned ahead."""
        return bool(self.lengths(seqs))

    def choose(self, seqs: Ordered[Sequence], most_rows: int) -> dict[Sequence, list[int]]:
        """The guesses for the next step, which has a single token of each of these sequences."""
        drafts = {seq: each.draft for seq in seqs if (each := self._drafted.get(seq)) and each.draft}
        if not drafts:
            return {}
        most = (most_rows - len(seqs)) // len(drafts)
        if sum(map(len, drafts.values())) > most_rows - len(seqs):
            drafts = {seq: draft[:most] for seq, draft in drafts.items() if most}
        return drafts

    def lengths(self, seqs: Collection[Sequence]) -> dict[Sequence, int]:
        """How many guesses the drafter shall make for each of these sequences in a step of all of them."""
        asked = list(seqs)
        if self._moved or self._asked != asked:
            self._lengths, self._asked, self._moved = self._choose(asked), asked, False
        return self._lengths

    def landed(self, seq: Sequence, guessed: int, held: int) -> None:
        """Learn what became of a draft of which so many guesses held."""
        self._counts.add(guessed, held)
        drafted = self._drafted.get(seq)
        record = None if drafted is None else drafted.record
        for at in range(min(held + 1, guessed)):
            self._acceptance.learn(min(at, STRONGEST), record, held=at < held)

    def learn_proposing(self, lengths: list[int], seconds: float) -> None:
        """Learn how long the drafter took to make so many guesses for sequences."""
        size, each = len(lengths).bit_length(), seconds / max(lengths)
        known = self._seconds.get(size, each)
        self._seconds[size] = known + _FADING * (each - known)

    def _choose(self, seqs: list[Sequence]) -> dict[Sequence, int]:
        """Let guesses become longer as long as tokens per second rise."""
        most = self._options.most_for(len(seqs))
        if not seqs or not most:
            return {}
        rows, tokens = len(seqs), float(len(seqs))
        step_time, reads = self.step_time, sum([len(seq.tokens) for seq in seqs]) / rows
        step, row = step_time.step, step_time.row + step_time.tokens(0, reads)
        nearest = min(self._seconds, key=lambda size: abs(size - rows.bit_length()), default=None)
        each = 0.0 if nearest is None else self._seconds[nearest]
        best, longest = rows / (step + rows * row) * (1 + _WORTH), 0
        chances = {seq: self._chances(seq, most) for seq in seqs}
        for length in range(1, most + 1):
            more = [own[length - 1] for own in chances.values() if len(own) >= length]
            rows += len(more)
            if not more or rows > self._most_rows:
                break
            tokens += sum(more)
            seconds = step + rows * row + length * each
            if tokens / seconds > best:
                best, longest = tokens / seconds, length
        self._without = 0 if longest else self._without + 1
        if self._without >= _TRIED_AGAIN:
            self._without, longest = 0, min(_TRIAL, most)
        return {seq: min(longest, len(own)) for seq, own in chances.items() if longest and own}

    def _chances(self, seq: Sequence, most: int) -> list[float]:
        """The chance of each of the next guesses for a sequence that it, and all before it, hold."""
        drafted = self._drafted.get(seq)
        if drafted is None:
            return []
        chances: list[float] = []
        chance, odds = 1.0, drafted.record.odds
        for at in range(min(most, drafted.most, seq.left - 2)):
            chance *= self._acceptance.rate(min(at, STRONGEST), odds)
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return chances
