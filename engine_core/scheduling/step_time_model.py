"""Estimates how long a step takes, by a line that is fitted to the steps that have landed, and limits how
long one may take, between what readers of streams bear and how long newcomers wait.

A step takes time for itself (the weights are read once), for each new token, for each cached position that a
token attends to, for each row that is sampled, and for each embedding of media that is encoded. The engine
reads all that it says of time from this line: what fits into a step, what a guess costs, how a step's time is
divided among its requests, and how long a newcomer waits.

The line is the least-squares fit to some steps that are remembered: the latest ones, and of each size of step
the last one, which counts less. So the line follows the work and the machine, and what was learned of long
prompts is still known after an hour of single tokens. Each step counts by its relative error, and an error as
three times the usual one at most: a step during which something else had the processor moves the line little,
while a machine that has become slower is followed as soon as most of the latest steps say so. What steps do
not tell, because they are all alike, stays as it was in the line before: a term counts as a step of its own.

`StepTime` knows no clock: whoever runs steps hands in how long each one took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, inf, log, sqrt
from operator import mul, sub

from engine_core.config import EngineConfig
from worker.worker_facts import WorkerFacts

STEP, TOKEN, READ, ROW, ENCODED = _TERMS = range(5)
"""The terms of the line: the step itself, new tokens, cached positions that they attend to, rows that are
sampled, and embeddings of encoded media."""

Work = list[float]
"""The amount of each term in a step, in the order above."""

_OF_TOKEN = (20.0, 1.0, 1e-4, 0.2, 1.0)
"""The first estimate of the seconds of each term, as a multiple of those of a token."""
_UNKNOWN_TOKEN = 1e-4
"""The estimate for a token itself, in seconds, if no step was timed at warm-up."""
_LEAST = 1e-3
"""The least seconds of a term, as a multiple of the first estimate."""

_MOST_LATEST, _MOST_SIZES = 64, 64
_OF_SIZE, _OF_LINE = 0.3, 0.3
"""What the error of the last step of a size is multiplied by, where that of each of the latest steps counts
once, and the error by which a term differs from the line before."""
_SWEEPS = 4
_EVERY, _EVERY_SECONDS = 32, 1.0
"""The line is fitted anew after so many steps or seconds, after each of the first steps, and after any with
an error that is too large to count."""
_FIRST_ERROR, _LEAST_ERROR, _ERROR_RATE = 1.0, 0.1, 0.1
"""The first and the least usual error (of a logarithm), and what the newest step counts in it."""
_USUAL_TIMES = 3.0
"""The multiple of the usual error that counts at most."""

_Landed = tuple[Work, float, float]
"""What a step computed, the seconds that it took, and its weight."""

_QUANTILE, _MARGIN_RATE = 0.995, 0.05
_FIRST_MARGIN, _MOST_MARGIN = 1.2, 1.6

_GAP, _WIDEST_GAP = 0.05, 0.22
"""The default gap between two tokens of a stream while no newcomer waits, and while many do: nobody reads
faster than ten tokens a second."""
_DECODING_STEPS = 4
"""The default gap is at least so many times what the rows that decode take: less would leave too little time
for prompts, and more for streams than waiting requests pay for."""
_GROWTH = 0.4
"""The part of the time that prompts of newcomers will take by which the default gap grows. So all of them are
read in some three steps, and the weights are not read once more for each of many small chunks."""
_WIDEST_STEPS = 6
"""The most times what the rows that decode take that it grows to. Prompts have five sixths of the time then,
and would gain little by more, which every reader waits for."""
_LEAST_PART = 0.25
"""The part that prompts get of a gap, even if decoding rows alone take longer, or they would starve."""
_ENOUGH_TOKENS, _ENOUGH_STEPS = 512, 8
"""Tokens that use a processor fully; or of an only prompt, if that is more, those that take so many times
what a step takes for itself. With more in a step each takes about as long, and who comes waits longer."""
_PROMPTS_SHARE = 1.5
"""A step that reads all prompts takes so many times as long beside texts, which get a third of it."""
_STEPS_OF_NEWCOMER = 1.5
"""Steps for which a newcomer beside background work waits: half of one that runs, on average, and its own."""


class StepTime:
    """Tells the seconds that steps take, and learns from those that have landed."""

    def __init__(self, timed: Sequence[tuple[int, float]] = ()) -> None:
        """`timed`: the tokens and the seconds of steps that were run at warm-up, with different counts."""
        self.margin = _FIRST_MARGIN
        """The time within which nearly all steps end that fill their bound, as a multiple of the expected."""
        step, token = _first_line(timed)
        line = [step, *(token * multiple for multiple in _OF_TOKEN[TOKEN:])]
        self._least = [seconds * _LEAST for seconds in line]
        self._set(line)
        self._latest: deque[_Landed] = deque(maxlen=_MOST_LATEST)
        self._last: dict[tuple[int, ...], _Landed] = {}
        """The last step of each size, by the bits of its amounts."""
        self._landed = 0
        self._unfitted = 0.0  # the seconds of steps since the line was fitted
        self._usual_error = _FIRST_ERROR

    def _set(self, line: list[float]) -> None:
        """Believe in these seconds of each term from now on."""
        self._seconds = line
        self.step, self.token, self.read, self.sample, _ = line
        """The seconds of a step, whatever it computes, of a token, of a position that one attends to, and of
        a row that is sampled."""
        self.row = self.token + self.sample
        """The seconds of a row that computes a token and samples the next one."""
        self.single = self.step + self.row
        """The seconds of a step of one such row."""

    def tokens(self, count: float, reads: float) -> float:
        """The seconds of so many new tokens, which attend to so many positions in all."""
        return self.token * count + self.read * reads

    def encoding(self, embeddings: float) -> float:
        """The seconds of encoding so many embeddings of media."""
        return self._seconds[ENCODED] * embeddings

    def encoded(self, seconds: float) -> float:
        """The embeddings of media that can be encoded within this time."""
        return seconds / self._seconds[ENCODED]

    def fitting(self, seconds: float, start: int) -> int:
        """The number of tokens from position `start` on that can be computed within this time."""
        token, read = self.tokens(1, start), self.read / 2
        return int(2 * seconds / (token + sqrt(token * token + 4 * read * seconds)))

    def learn(self, work: Work, seconds: float, *, fills: bool) -> None:
        """Learn from a step that has landed. `fills`: it was to take most of the time that it may.

        Only such steps say how late one can be: what disturbs a machine for milliseconds makes a step of a
        single token twice as long, and one that fills its bound hardly longer.
        """
        expected = sum(map(mul, self._seconds, work))
        if expected <= 0 or seconds <= 0:
            return
        error, most = abs(log(seconds / expected)), _USUAL_TIMES * max(_LEAST_ERROR, self._usual_error)
        self._usual_error += _ERROR_RATE * (min(error, most) - self._usual_error)
        self._landed += 1
        self._unfitted += seconds
        self._latest.append((work, seconds, 1.0))
        size = tuple(map(int.bit_length, map(int, work)))
        self._last.pop(size, None)
        self._last[size] = work, seconds, _OF_SIZE
        if len(self._last) > _MOST_SIZES:
            del self._last[next(iter(self._last))]
        is_due = self._landed <= _EVERY or self._landed % _EVERY == 0 or self._unfitted >= _EVERY_SECONDS
        if is_due or error > most:
            self._unfitted = 0.0
            self._fit(exp(_USUAL_TIMES * max(_LEAST_ERROR, self._usual_error)))
        if fills:
            self._learn_margin(seconds / expected)

    def _fit(self, most: float) -> None:
        """Set the whole line, and then each term while the others stay, to what fits best.

        A step counts as if it had taken `most` times as long as expected, or a `most`-th, at most.
        """
        line, errors = list(self._seconds), list[list[float]]()
        for work, seconds, weight in (*self._latest, *self._last.values()):
            expected = sum(map(mul, line, work))
            scale = weight / expected
            counted = min(most, max(1 / most, seconds / expected))
            errors.append([*map(scale.__mul__, work), counted * weight])
        columns, products = list(zip(*errors, strict=True)), list[list[float]]()
        for one in columns[:-1]:
            products.append([])
            for other in columns:
                products[-1].append(float(sum(map(mul, one, other))))
        for term, seconds in enumerate(line):
            products[term][term] += (_OF_LINE / seconds) ** 2
            products[term][-1] += _OF_LINE**2 / seconds
        line[:] = map(max, _solved(products), self._least)
        for _ in range(_SWEEPS):  # where a term would be below its least, others give way
            for term, (*row, takes) in enumerate(products):
                rest = takes - sum(map(mul, row, line))
                line[term] = max(self._least[term], line[term] + rest / row[term])
        self._set(line)

    def _learn_margin(self, ratio: float) -> None:
        """Move the margin towards the ratio below which that quantile of all steps lies."""
        move = _QUANTILE if ratio > self.margin else _QUANTILE - 1
        self.margin = min(_MOST_MARGIN, max(1.0, self.margin + _MARGIN_RATE * move))


def _solved(equations: list[list[float]]) -> list[float]:
    """Solve equations, each of which has its right side last, by Gauss's elimination."""
    rows = list(equations)
    for at in range(len(rows)):
        pivot = rows[at]
        for other, row in enumerate(rows):
            if other != at:
                factor = row[at] / pivot[at]
                rows[other] = [*map(sub, row, map(factor.__mul__, pivot))]
    return [row[-1] / row[at] for at, row in enumerate(rows)]


def _first_line(timed: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The seconds of a step and of a token, from the quickest steps of the fewest and of the most tokens."""
    if not timed:
        return _UNKNOWN_TOKEN * _OF_TOKEN[STEP], _UNKNOWN_TOKEN
    few, many = min(timed)[0], max(timed)[0]
    quick, slow = (min(seconds for count, seconds in timed if count == tokens) for tokens in (few, many))
    token = (slow - quick) / (many - few) if many > few and slow > quick else quick / _OF_TOKEN[STEP]
    return max(quick - few * token, quick / 10), token


class StepTimeLimit:
    """Says how much prompts and texts get of a step beside the rows that decode. Times are in seconds."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts, step_time: StepTime) -> None:
        self.readers = 0
        """Sequences whose tokens somebody reads as they come."""
        self.background = 0
        """Sequences of background work, waiting or running."""
        self._step_time = step_time
        self._most_tokens = facts.max_num_batched_tokens
        asked, on_cpu = config.max_token_gap_ms, facts.device == "cpu"
        self._asked = None if asked is None else asked / 1000
        self._is_bounded = bool(asked) or (asked is None and on_cpu)
        self._is_brief = asked != 0 and on_cpu and "generate" in facts.tasks
        """Whether steps have no more tokens than use a processor fully, though nobody reads: somebody may
        come who waits for a first token."""

    @property
    def is_bounded(self) -> bool:
        """Whether the next step has to end soon, for readers or for who may come beside background work."""
        return self._is_bounded and bool(self.readers or self.background)

    def left(self, decoding: float, newcomers: float, *, only_prompt: bool = False) -> float:
        """Tell what can be added to a step whose decoding rows take so long, itself included.

        `newcomers`: what the prompts of those will take who wait for their first token. `only_prompt`: there
        is one, so nobody would be answered earlier by shorter steps.
        """
        step_time = self._step_time
        if self.is_bounded:
            gap = self._gap(decoding, newcomers) / (_STEPS_OF_NEWCOMER if self.background else 1)
            least = gap * _LEAST_PART
            if self._asked is None:  # no step reads the weights for a few tokens of a prompt
                least = max(least, step_time.step)
            return max(gap - decoding, least)
        if not self._is_brief:
            return inf
        left = max(self._enough, _ENOUGH_STEPS * step_time.step if only_prompt else 0.0)
        if newcomers > step_time.tokens(1, 0):
            # Texts that share the step make first tokens later: they get what is left of a gap.
            left = min(left, max(_PROMPTS_SHARE * newcomers, self._gap(decoding, 0.0) - decoding))
        return left

    @property
    def spare(self) -> float:
        """The seconds beyond `left` that may be added if they complete a prompt: a rest would need a step."""
        return self._step_time.step if self._is_brief and not self.is_bounded else 0.0

    @property
    def _enough(self) -> float:
        """What can be added to a step while nobody reads."""
        return max(self._step_time.tokens(_ENOUGH_TOKENS, 0), self._step_time.step)

    def most_for_prompts(self, decoding: float, newcomers: float) -> float:
        """Tell what prompts get of each such step, under both bounds, if there are enough of them."""
        most = self._step_time.tokens(self._most_tokens, 0)
        if self._is_brief:
            most = min(most, self._enough)
        return min(most, self.left(decoding, newcomers)) if self.is_bounded else most

    def _gap(self, decoding: float, newcomers: float) -> float:
        """Tell what a step is to take beside streams, so that nearly all of them end within the gap."""
        step_time, gap = self._step_time, self._asked
        if gap is None:
            single, decoding = step_time.single, max(decoding, step_time.single)
            gap = max(_GAP, _DECODING_STEPS * (single if self.background else decoding))
            gap = max(gap, min(_WIDEST_GAP, _WIDEST_STEPS * decoding, gap + _GROWTH * newcomers))
        return gap / step_time.margin
