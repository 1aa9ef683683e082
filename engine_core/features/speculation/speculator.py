"""Guesses the next tokens of sequences, and says for which of them, and for how many tokens, that pays.

How often guesses hold, of all sequences and of each one (`Acceptance`, `AcceptanceRecord`), is learned from
each token that lands, and decides how many tokens are guessed next (`Speculator`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from operator import itemgetter

from engine_core.engine_stats import GuessTotals
from engine_core.features.speculation.ngram_lookup import STRONGEST, Lookup
from engine_core.features.speculation.suffix_lookup import EndedAnswers, number_of
from engine_core.options.speculation_options import SpeculationOptions
from engine_core.scheduling.sequence import Sequence
from engine_core.scheduling.step_time_model import StepTime
from worker.worker_facts import WorkerFacts

_TRIALS, _KEPT = 16.0, 0.995
"""The trials that the first estimate of a rate is worth, and what remains of all trials after another one."""
_OWN_TRIALS, _OWN_KEPT = 4.0, 0.97
"""The same for one sequence, of which it is first believed that it is like all others."""
_MOST_RATE = 0.98


class DraftCounts:
    """Counts drafts and what became of their guesses, for statistics."""

    def __init__(self, most: int) -> None:
        """`most`: the most guesses of a draft."""
        self._drafts = self._guessed = 0
        self._held = [0] * most

    def add(self, guessed: int, held: int) -> None:
        """Count a draft of which so many guesses held."""
        self._drafts += 1
        self._guessed += guessed
        for at in range(held):
            self._held[at] += 1

    @property
    def totals(self) -> GuessTotals:
        return GuessTotals(self._drafts, self._guessed, list(self._held))


class AcceptanceRecord:
    """Tells how much better the guesses for one sequence hold than those for all, the latest most of all."""

    __slots__ = ("_expected", "_held", "_missed", "_unexpected")

    def __init__(self) -> None:
        self._held = self._expected = self._missed = self._unexpected = _OWN_TRIALS

    def learn(self, rate: float, *, held: bool) -> None:
        """Count a guess that held or missed, and holds at this rate for all sequences."""
        kept = _OWN_KEPT
        self._held = self._held * kept + held
        self._expected = self._expected * kept + rate
        self._missed = self._missed * kept + (not held)
        self._unexpected = self._unexpected * kept + 1 - rate

    @property
    def odds(self) -> float:
        """The factor of the odds that a guess holds."""
        smooth = _OWN_TRIALS
        more = (self._held + smooth) / (self._expected + smooth)
        return more * (self._unexpected + smooth) / (self._missed + smooth)


_OF_MATCHES = [max(0.1, 1 - 1.2 * max(strength, 1) ** -0.6) for strength in range(STRONGEST + 1)]
"""The rates that are believed at first. A few tokens that repeat by chance, as in short chats, are not
trusted: a text that truly repeats itself shows that within some tokens."""


class Acceptance:
    """Learns how often a guess holds, by the strength of the match that it comes from."""

    def __init__(self, first: Ordered[float] = _OF_MATCHES) -> None:
        """`first` are the rates that are believed before anything is known."""
        self._held = [_TRIALS * rate for rate in first]
        self._tried = [_TRIALS] * len(first)

    def rate(self, strength: int, odds: float = 1.0) -> float:
        """The chance that a guess holds, of a sequence with this factor of the odds."""
        rate = self._held[strength] / self._tried[strength]
        return min(_MOST_RATE, rate * odds / (1 - rate + rate * odds))

    def chances(self, strength: int, odds: float, count: int, least: float) -> list[float]:
        """The chances of the next guesses to hold with all before them, but for those under the least."""
        found: list[float] = []
        chance, all_held, tried = 1.0, self._held, self._tried
        for each in range(strength, strength + count):
            at = each if each < STRONGEST else STRONGEST
            held = all_held[at] * odds
            rate = held / (tried[at] - all_held[at] + held)  # as `rate` has it
            chance *= rate if rate < _MOST_RATE else _MOST_RATE
            if chance < least:
                break
            found.append(chance)
        return found

    def learn(self, strength: int, record: AcceptanceRecord | None, *, held: bool) -> None:
        """Count a guess that held or missed, of a sequence with this record."""
        all_held, tried = self._held, self._tried
        if record is not None:
            record.learn(all_held[strength] / tried[strength], held=held)
        all_held[strength] = all_held[strength] * _KEPT + held
        tried[strength] = tried[strength] * _KEPT + 1


_chance = itemgetter(0)
_LEAST_CHANCE = 0.05
"""A guess that holds less often is never worth a row."""
_WORTH = 0.02
"""The least gain (of a logarithm) for which tokens are guessed."""
_OF_SURE = 0.1
"""The gain that tokens are believed to bring at least which must come: in a step of their own they would take
no less. So they are tried, whatever the line says of rows. Steps of one row each cannot correct it, and one
prompt that was held up would stop all guesses."""
_FADING = 0.2
"""The part of the gain of the latest step in that by which is decided whether steps are planned ahead."""
_LOST_EACH = 1e-5
_LOST = {"cpu": 0.0}
_LOST_ELSEWHERE = 1e-3
"""The seconds for each row, and for a step on a device, by which a step takes longer that is not planned
while the one before it runs. On a CPU, which would plan and compute at the same time, it is hardly longer."""


@dataclass(slots=True)
class _Guessed:
    """The guesses of one sequence, and how often its guesses held."""

    lookup: Lookup
    most: int
    record: AcceptanceRecord = field(default_factory=AcceptanceRecord)
    forced: list[int] = field(default_factory=list[int])
    """The next tokens instead of which no others may come."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The number of tokens to guess for each sequence, and the gain that is expected of them."""

    counts: dict[Sequence, int]
    gain: float
    """The logarithm of the tokens per second, as a multiple of those without guesses."""


_NOTHING = _Choice({}, 0.0)


class Speculator:
    """Guesses the next tokens of sequences, and decides for how many that pays.

    How often guesses hold is learned from every token that lands, whether it was guessed or not: it is
    compared with the one that would have been guessed. So nothing has to be tried to know if it would pay.

    Most texts have nothing to guess most of the time: then a step costs a look into the table of places.
    """

    def __init__(
        self,
        options: SpeculationOptions,
        facts: WorkerFacts,
        step_time: StepTime,
        forced: Callable[[Sequence], list[int]],
    ) -> None:
        """`forced`: what finds the next tokens, of a sequence that is followed, instead of which no others
        may come."""
        self._options, self._forced = options, forced
        self._most_for = lru_cache(maxsize=1024)(options.most_for)
        self._longest = options.suffix_depth if options.method == "suffix" else options.most_match
        self._answers: EndedAnswers | None = None
        self._least_chance, self._factor = _LEAST_CHANCE, float(options.most)
        if options.method == "suffix":
            self._least_chance = max(_LEAST_CHANCE, options.suffix_chance)
            self._factor = options.suffix_factor
            if options.suffix_answers:
                memory = options.suffix_bytes, options.least_match, self._longest, options.suffix_answers
                self._answers = EndedAnswers(*memory)
        self._most_rows = facts.most_rows
        self._lost = _LOST.get(facts.device, _LOST_ELSEWHERE)
        self._acceptance = Acceptance()
        self.step_time = step_time
        self._guessed: dict[Sequence, _Guessed] = {}
        self._ready: dict[Sequence, _Guessed] = {}
        """The sequences that have something to guess behind their last token."""
        self._gain = 0.0
        """The gain of the latest steps, or what it would have been."""
        self._moved = False
        """Whether anything has changed since `_gain` was computed."""
        self._chosen, self._chosen_for = _NOTHING, list[Sequence]()
        """What was chosen then, and among which sequences."""
        self._counts = DraftCounts(options.most)

    @property
    def totals(self) -> GuessTotals:
        return self._counts.totals

    def enter(self, seq: Sequence) -> None:
        """Begin with a sequence that has its first token."""
        most = self._options.most
        if (asked := seq.request.most_guesses) is not None:
            most = min(most, asked)
        if most <= 0:
            return
        salt = 0 if self._answers is None else number_of(seq.request.salt, seq.request.adapter)
        lookup = Lookup(seq.tokens, seq.left, self._options.least_match, self._longest, self._answers, salt)
        lookup.enter()
        self._guessed[seq] = guessed = _Guessed(lookup, most)
        if seq.is_followed:
            self._foresee(seq, guessed, [])
        self._note(seq, guessed)

    def follow(self, seq: Sequence, count: int) -> None:
        """Learn from the last `count` tokens of a sequence, which are new."""
        if (guessed := self._guessed.get(seq)) is None:
            return
        lookup, read = guessed.lookup, guessed.lookup.read
        sure = len(guessed.forced) if guessed.forced else 0
        if seq.is_followed and not seq.done:
            self._foresee(seq, guessed, seq.tokens[-count:])
        if len(seq.tokens) - read > count:
            lookup.enter()  # its prompt is long
        else:
            for token in seq.tokens[read:]:
                if sure > 0:
                    sure -= 1  # it says nothing of others
                elif strength := lookup.strength:
                    self._acceptance.learn(strength, guessed.record, held=lookup.expected == token)
                lookup.follow()
        self._note(seq, guessed)

    def _foresee(self, seq: Sequence, guessed: _Guessed, new: list[int]) -> None:
        """Find what is forced behind its new tokens, unless enough of it is known from before."""
        rest = guessed.forced[len(new) :] if guessed.forced[: len(new)] == new else []
        guessed.forced = rest if len(rest) >= guessed.most else self._forced(seq)

    def _note(self, seq: Sequence, guessed: _Guessed) -> None:
        """Note whether there is something to guess behind the last token of a sequence, which is new."""
        self._moved = True
        if guessed.forced or guessed.lookup.strength:
            self._ready[seq] = guessed
        elif self._ready:
            self._ready.pop(seq, None)

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended, but for its answer if answers are remembered."""
        self._ready.pop(seq, None)
        if self._guessed.pop(seq, None) and self._answers is not None:
            begin = max(0, seq.prompt_len - self._longest)
            self._answers.add(seq.tokens[begin:], number_of(seq.request.salt, seq.request.adapter))

    def pays(self, seqs: Collection[Sequence]) -> bool:
        """Whether steps with guesses, planned when the one before has landed, beat steps planned ahead."""
        if not seqs or not self._most_for(len(seqs)):
            return False
        if self._moved:
            self._weigh(seqs)
        if self._gain <= _WORTH:
            return False
        lost = self._lost + _LOST_EACH * len(seqs)
        step_time = self.step_time
        return self._gain > _WORTH + log(1 + lost / (step_time.step + step_time.row * len(seqs)))

    def choose(self, seqs: Ordered[Sequence], most_rows: int) -> dict[Sequence, list[int]]:
        """The guesses for the next step, which has a single token of each of these sequences."""
        if not self._ready or not self._most_for(len(seqs)):
            return {}
        if self._moved:
            self._weigh(seqs)
        choice = self._chosen
        if self._chosen_for != list(seqs) or sum(choice.counts.values()) > most_rows - len(seqs):
            choice = self._choose(seqs, most_rows)
        drafts: dict[Sequence, list[int]] = {}
        for seq, count in choice.counts.items():
            if draft := self._draft(self._guessed[seq], count):
                drafts[seq] = draft
        return drafts

    def _draft(self, guessed: _Guessed, count: int) -> list[int]:
        """The tokens that must come, and what is guessed to follow them."""
        sure = guessed.forced[:count]
        if not sure:
            return guessed.lookup.draft(count)
        return sure + (guessed.lookup.behind(sure, count - len(sure))[0] if len(sure) < count else [])

    def landed(self, seq: Sequence, guessed: int, held: int) -> None:
        """Count a draft of which so many guesses held."""
        self._counts.add(guessed, held)

    def _weigh(self, seqs: Collection[Sequence]) -> None:
        """Choose anew, as something has changed, and let what that gains count for the steps to come."""
        self._moved = False
        self._chosen = _NOTHING
        if self._ready:
            self._chosen, self._chosen_for = self._choose(seqs, self._most_rows), list(seqs)
        self._gain += _FADING * (self._chosen.gain - self._gain)

    def _choose(self, seqs: Collection[Sequence], most_rows: int) -> _Choice:
        """Take guesses, the likeliest to hold first, as long as tokens per second rise."""
        rows, step_time = len(seqs), self.step_time
        each = step_time.row + step_time.tokens(0, sum([len(seq.tokens) for seq in seqs]) / rows)
        seconds, tokens = step_time.step + rows * each, float(rows)
        plain, least = tokens / seconds, max(self._least_chance, rows * each / seconds)
        if rows >= most_rows:
            return _NOTHING
        offered: list[tuple[float, Sequence]] = []
        most = self._most_for(rows)
        for seq in seqs:
            if (guessed := self._ready.get(seq)) is not None:
                offered += self._offers(seq, guessed, most, least)
        offered.sort(key=_chance, reverse=True)
        counts: dict[Sequence, int] = {}
        for chance, seq in offered[: most_rows - rows]:
            if chance * seconds <= tokens * each:
                break
            tokens += chance
            seconds += each
            counts[seq] = counts.get(seq, 0) + 1
        gain = log(tokens / seconds / plain)
        if counts and offered[0][0] == 1.0:
            gain = max(gain, _OF_SURE)
        return _Choice(counts, gain) if gain > _WORTH else _NOTHING

    def _offers(
        self, seq: Sequence, guessed: _Guessed, most: int, least: float
    ) -> list[tuple[float, Sequence]]:
        """The chance of each of the next guesses for a sequence that it, and all before it, hold.

        There are `most` at most, and those with less than the `least` chance are left out.
        """
        forced, strength = guessed.forced, guessed.lookup.strength
        most, sure = min(most, guessed.most, seq.left - 1), 0
        if forced:
            sure = min(len(forced), most)
            strength = guessed.lookup.behind(forced, 0)[1] if sure < most else 0
        more, odds = min(most - sure, int(self._factor * strength)), guessed.record.odds
        chances = self._acceptance.chances(strength, odds, more, least)
        return [(chance, seq) for chance in [1.0] * sure + chances]
