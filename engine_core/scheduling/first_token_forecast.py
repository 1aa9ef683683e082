"""Forecasts when a request gets its first answer, by the work before it and its class's share.

How long answers get is learned from those that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import inf, log

from engine_core.engine_stats import Rates, expected_length
from engine_core.scheduling.planned_step import PlannedStep
from engine_core.scheduling.queue.shares import WEIGHTS, Backlog, WorkClass
from engine_core.scheduling.sequence import Place, Sequence
from engine_core.scheduling.step_time_model import StepTime, StepTimeLimit

_PRIOR = 100.0
"""The tokens of an answer while none has ended."""
_KEPT = 0.95
"""What counts of all answers before when another one ends."""
_NOTHING = 1e-9
"""Seconds of work that are left of sums and differences of others."""
_AT_A_TIME = 8
"""A long queue is forecast in parts, of an eighth of what is left of it each."""
_USUAL_PROMPT = 1024
"""The length of a prompt for which rates are told: a token of a longer one takes a little longer."""


MUCH = 2
"""A prompt overtakes one that has so many times as many tokens to compute."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of sequences that generate, and how many of them must become free for one more."""

    running: Ordered[Sequence]
    usable: int
    """The number of slots that are taken, or free and with memory."""
    short: int


class AnswerLengths:
    """Expects each token of an answer to be its last with the same chance. Running answers count, too."""

    def __init__(self) -> None:
        self._tokens = _PRIOR
        self._stops = 1.0

    def learn(self, tokens: int, *, stopped: bool) -> None:
        """Count an answer of so many tokens. `stopped`: it ended before the limit of its request."""
        self._tokens = _KEPT * self._tokens + tokens
        self._stops = _KEPT * self._stops + stopped

    def stop_rate(self, running: Iterable[Sequence]) -> float:
        """The chance of a token to be the last of its answer."""
        return self._stops / (self._tokens + sum([len(seq.tokens) - seq.prompt_len for seq in running]))


class FirstTokenForecast:
    """Counts what waits for the engine, and says how long it will. All times are in seconds."""

    def __init__(self, step_time: StepTime, bound: StepTimeLimit, *, causal: bool, overtakes: bool) -> None:
        """`overtakes`: whether prompts overtake those that take much longer."""
        self._step_time, self._bound, self._causal = step_time, bound, causal
        self._overtakes = overtakes
        self._backlog = Backlog()
        self._lengths = AnswerLengths()
        self.prompts: dict[Sequence, float] = {}
        """What the uncomputed prompt of each sequence was expected to take, less what is planned."""
        self.decoding, self.decoding_rows = 0.0, 0
        """What the decoding rows of the step planned last take, and their number."""

    @property
    def newcomers(self) -> float:
        """What the prompts of those will take who wait for their first token."""
        return self._backlog.prompts[WorkClass.FIRST_TOKEN]

    def enter(self, seq: Sequence, cached: int) -> None:
        """Count a sequence that waits, and whose prompt begins with so many cached tokens."""
        seq.expected_cached = cached
        count = len(seq.tokens) - cached
        reads = count * cached + count * count // 2 if self._causal else count * count
        seconds = self._step_time.tokens(count, reads) + self._step_time.sample * (not seq.pools)
        self.prompts[seq] = seconds
        for backlog in (self._backlog, seq.owner.backlog):
            backlog.prompts[seq.work_class] += seconds
        self.count_answer(seq, 1)

    def count_answer(self, seq: Sequence, sign: int) -> None:
        """Count the answer to a sequence that waits; with the sign -1, count it no more."""
        if not seq.pools:
            for backlog in (self._backlog, seq.owner.backlog):
                backlog.add_answer(seq.left, may_stop=seq.may_stop, sign=sign)

    def plan(self, planned: PlannedStep) -> None:
        """Count no more what a step that is planned computes of prompts."""
        for seq, row, cost in zip(planned.seqs, planned.step.seqs, planned.costs, strict=True):
            if (left := self.prompts.get(seq, 0.0)) > cost and not (row.samples or row.pools):
                self.prompts[seq] = left - cost
                self._reduce(seq, cost)
            elif left:
                self._reduce(seq, self.prompts.pop(seq))

    def _reduce(self, seq: Sequence, seconds: float) -> None:
        for backlog in (self._backlog, seq.owner.backlog):
            backlog.prompts[seq.work_class] -= seconds

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended, but for the length of its answer."""
        self._reduce(seq, self.prompts.pop(seq, 0.0))
        if seq.place is not Place.RUNNING:
            self.count_answer(seq, -1)
        if seq.record.first_token is not None and seq.may_stop:
            self._lengths.learn(len(seq.tokens) - seq.prompt_len, stopped=seq.left > 0)

    def expected(self, work_class: WorkClass, slots: Slots | None, own: Sequence | None = None) -> float:
        """Tell when `own` has its first answer, from the end of steps in flight; without it, when all have
        that wait in a class. Without `slots` they need none."""
        every, least, ahead = self._step_time.step + self.decoding, 0.0, inf
        prompts = list(self._backlog.prompts)
        if own is not None and own.owner.part < 1:
            ahead = own.owner.backlog.prompts[work_class]
            prompts[work_class] = min(prompts[work_class], ahead / own.owner.part)
        if slots is not None and slots.short > 0:
            every = max(every, self._full_step(slots.usable))
            least = self._steps_until_slot(slots, own)
        elif own is not None and self._overtakes and work_class is WorkClass.FIRST_TOKEN:
            ahead = self._at_half_speed(own)
        if slots is not None and own is not None and own.owner.is_held_back:
            least = max(least, self._steps_until_turn(slots, own))
        return self._seconds_until(work_class, prompts, ahead, every, least)

    def _at_half_speed(self, own: Sequence) -> float:
        """The seconds of prompts until a prompt is read that overtakes those that take much longer."""
        near = [seq for seq in self.prompts if seq.unread < own.unread * MUCH]
        return 2 * sum(self.prompts[seq] for seq in near if seq.work_class is own.work_class)

    def _seconds_until(
        self, work_class: WorkClass, prompts: list[float], ahead: float, every: float, least: float
    ) -> float:
        """Tell when the prompts of a class are computed, or what is `ahead` of one of them, in a `least`
        number of steps, each of which takes `every` beside them."""
        ahead, total, others = min(ahead, prompts[work_class]), sum(prompts), 0
        for each, waiting in enumerate(prompts):
            if each != work_class and waiting > _NOTHING:
                others += WEIGHTS[each]
        # While others wait as well, this class gets its share; what they leave of it, it gets too.
        ahead += min(total - ahead, ahead * others / WEIGHTS[work_class])
        newcomers = prompts[WorkClass.FIRST_TOKEN] / max(total, _NOTHING)
        seconds = steps = 0.0
        while not steps or ahead > _NOTHING:
            part = max(_NOTHING, self._bound.most_for_prompts(every, newcomers * total))
            count = max(1, int(ahead / part / _AT_A_TIME))
            computed = min(total, count * part)  # the last step is as full as all can make it
            seconds += count * every + computed
            steps += count
            ahead -= count * part
            total -= computed
        return seconds + max(0.0, least - steps) * every

    def rates(self, slots: Slots) -> Rates:
        """Tell how fast the engine works when all slots are taken."""
        step = self._full_step(slots.usable)
        token = self._step_time.tokens(_USUAL_PROMPT, _USUAL_PROMPT**2 // 2) / _USUAL_PROMPT
        return Rates(
            prompt_rate=1 / token,
            step=step,
            step_rows=slots.usable,
            step_prompts=max(1.0, self._bound.most_for_prompts(step, self.newcomers) / token),
            stop_rate=self._lengths.stop_rate(slots.running),
        )

    def _full_step(self, rows: int) -> float:
        """The seconds of a step in which so many sequences get a token."""
        row = self.decoding / self.decoding_rows if self.decoding_rows else 0.0
        return self._step_time.step + rows * max(row, self._step_time.row)

    def _steps_until_slot(self, slots: Slots, own: Sequence | None) -> float:
        """The steps until enough sequences have ended, of those that run and those that wait before it."""
        stop_rate = self._lengths.stop_rate(slots.running)
        steps = _steps_until_all_end(slots.running, self._backlog, own, stop_rate) / slots.usable
        if slots.short <= len(slots.running) == slots.usable:
            steps = _steps_until_ends(slots.short, slots.running, stop_rate)
        if own is None or own.owner.part == 1:
            return steps
        # It waits for sequences of the same owner only, if these have their part of the slots.
        mine, part = own.owner, max(1.0, slots.usable * own.owner.part)
        if sum(mine.live) <= part:
            return 0.0
        running = [seq for seq in slots.running if seq.owner is mine]
        return min(steps, _steps_until_all_end(running, mine.backlog, own, stop_rate) / part)

    def _steps_until_turn(self, slots: Slots, own: Sequence) -> float:
        """The steps until a sequence runs whose owner may have only so many that run."""
        running, stop_rate = [seq for seq in slots.running if seq.owner is own.owner], self._lengths.stop_rate
        steps = _steps_until_all_end(running, own.owner.backlog, own, stop_rate(slots.running))
        return steps / max(1, own.owner.max_running)


def _steps_until_all_end(
    running: Ordered[Sequence], waiting: Backlog, own: Sequence | None, stop_rate: float
) -> float:
    """The steps that answers take one after the other: those that run and those that wait, but `own`."""
    all_answers = Backlog()
    for seq in running:
        all_answers.add_answer(seq.left, may_stop=seq.may_stop)
    tokens = all_answers.answers(stop_rate) + waiting.answers(stop_rate)
    if own is not None:
        tokens -= expected_length(own.left, stop_rate) if own.may_stop else own.left
    return max(0.0, tokens)


def _steps_until_ends(count: int, running: Iterable[Sequence], stop_rate: float) -> float:
    """The steps until so many of the running sequences have ended."""
    sure: list[float] = []
    stopping: list[int] = []
    for seq in running:
        if seq.may_stop:
            stopping.append(seq.left)
        else:
            sure.append(seq.left)
    every = len(stopping)
    for place, most in enumerate(sorted(stopping)):
        # The usual time until so many of several have ended that end by chance.
        sure.append(min(most, -log(1 - (place + 0.5) / every) / stop_rate))
    return sorted(sure)[count - 1]
