"""The contract between the engine's core and its features: the moments at which the core calls them.

A feature is an optional capability: a class in a folder of `engine_core/features/` that overrides the hooks
it needs. `engine_core/features/installed.py` chooses those that a model with its options has, in the order in
which they are called. The core keeps, for each hook, those that override it, so a feature that is not there
costs no call, nor does one that rests, until a request asks for it. A feature knows the core, and no other
feature; what it has to know of a sequence, it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from operator import attrgetter
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeVar

from engine_core.engine_stats import Stats
from engine_core.protocol import AddRequest, Failed, Finish, OutputsByClient, Tokens
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.sequence import Sequence
from worker.protocol import NewSeq, StepBounds, StepOutput
from worker.worker_facts import WorkerFacts


class Feature:
    """The base of features. Each hook does nothing unless a feature overrides it."""

    asked_by: ClassVar[tuple[str, ...]] = ()
    """The fields of `AddRequest`, of which a request gives one if it asks for the feature. One that rests
    hears of no other requests; one without such fields hears of all."""

    # A request comes, and ends.

    def facts_of(self, add: AddRequest, facts: WorkerFacts) -> WorkerFacts:
        """Return the facts of the model by which a request is checked."""
        return facts

    def refuse(self, add: AddRequest) -> str | None:
        """Say why what a request asks of the feature cannot be had."""

    def lacks_room(self, add: AddRequest) -> str | None:
        """Say in a clause what others have that a request has to wait for elsewhere."""

    def enter(self, seq: Sequence) -> None:
        """Take note of a new sequence, before it waits."""

    def forecast(self, seq: Sequence, now: float) -> Tokens | Failed | None:
        """Refuse or end a sequence, whose wait is forecast now, by its last answer."""

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended, in whatever way."""

    def may_pause(self, seq: Sequence) -> bool:
        """Say whether a sequence may stand still while nobody reads its answer."""
        return True

    # A step is planned.

    def may_begin(self, now: float) -> bool:
        """Say whether the next step may begin, or has to wait for something outside of the engine."""
        return True

    def waits_for_landing(self) -> bool:
        """Say whether the next step is planned only when those in flight have landed."""
        return False

    def choose(self, runnable: list[Sequence]) -> list[Sequence]:
        """Return those of the running sequences that may be in the step that is planned now."""
        return runnable

    def may_run(self, seq: Sequence) -> bool:
        """Say whether a waiting sequence may be in the step that is planned now."""
        return True

    def fits(self, seq: Sequence) -> bool:
        """Say whether a waiting sequence has room in memory of the feature."""
        return True

    def divert(self, seq: Sequence, now: float) -> bool:
        """Take a waiting sequence whose turn has come out of the queue, if it must wait for something first.

        The feature puts it back. Returns whether it was taken out.
        """
        return False

    def begin_step(self) -> None:
        """Take note that another step is planned from now on."""

    def least(self, seq: Sequence, start: int) -> int:
        """Tell the fewest positions from `start` on, before `seq.free_from`, that can be computed."""
        return 1

    def reach(self, seq: Sequence, start: int, count: int, step: StepBuilder) -> int:
        """Return as many of the next `count` positions as can be computed in a step.

        It is asked when a sequence gets its slot, and for positions before `seq.free_from`.
        """
        return count

    def admit(self, seq: Sequence, new: NewSeq, step: StepBuilder) -> NewSeq:
        """Complete what is told to the worker about a sequence that gets a slot with a step."""
        return new

    def add_row(self, seq: Sequence, count: int, step: StepBuilder) -> float:
        """Take note of a row for the next `count` positions, which begin before `seq.free_from`.

        Returns the seconds that the step takes for it beside those for its tokens.
        """
        return 0.0

    def complete(self, step: StepBuilder) -> None:
        """Add what the step has room for beside the rows that it has."""

    def forced(self, seq: Sequence) -> list[int]:
        """Tell the next tokens of a sequence that is followed of which no other may come instead."""
        return []

    def fitting(self, seq: Sequence, tokens: list[int]) -> int:
        """Tell how many of these tokens may come next in a sequence that is followed."""
        return len(tokens)

    def finish(self, step: StepBuilder) -> None:
        """Complete the rows of a step, and what it tells the worker beside them (`step.told`)."""

    def release(self, seq: Sequence) -> None:
        """Take note that a sequence loses its slot."""

    # A step has landed, or failed.

    def bind(self, planned: PlannedStep, outputs: OutputsByClient) -> StepBounds | None:
        """Tell the bounds that a step waits for; None if they depend on an earlier step.

        Sequences that cannot go on end, and `outputs` gets their answers.
        """

    def arrive(self, planned: PlannedStep, output: StepOutput) -> None:
        """Take note of what a step has brought, before its rows land."""

    def take(self, seq: Sequence, tokens: list[int], finish: Finish | None) -> Taken:
        """Take the new tokens of a sequence that is followed (`Sequence.is_followed`).

        `finish`: why the last of them ends the text, if it does. Returns how many of them count, why the last
        of these ends the text, and why the sequence fails behind them, if it does.
        """
        return Taken(len(tokens), finish, "")

    def report(self, seq: Sequence, answer: Tokens) -> Tokens:
        """Complete an answer that tells the times of a request."""
        return answer

    def land_step(self, planned: PlannedStep, output: StepOutput, seconds: float) -> None:
        """Take note of what a step has brought, whose rows have landed."""

    def fail_step(self, planned: PlannedStep, again: list[Sequence], behind: bool) -> None:
        """Take note of a step that failed, perhaps `behind` another, whose sequences `again` wait again."""

    # Between steps.

    def poll(self, now: float, in_flight: int) -> OutputsByClient:
        """Do what has become due, while so many steps are in flight; returns what clients get."""
        return {}

    def next_time(self) -> float:
        """Tell the time by which `poll` has to be called, though no step lands and no request comes."""
        return inf

    def waits(self) -> bool:
        """Say whether sequences wait for something outside of the engine that is under way."""
        return False

    def work_beside(self, now: float, in_flight: int, wait: bool) -> None:
        """Work beside so many steps; without any, `wait` for what sequences wait for if that is allowed."""

    def work_idle(self, now: float) -> None:
        """Work while the engine has nothing to do."""

    def stop(self) -> None:
        """Bring to an end what outlives the engine, which ends or falls asleep."""

    def forget_prefixes(self) -> None:
        """Forget what was computed for earlier prompts."""

    def add_stats(self, stats: Stats) -> Stats:
        """Return the engine's statistics with those of the feature."""
        return stats


class Taken(NamedTuple):
    """A feature's verdict on new tokens: how many count, whether they end the text, or why it fails."""

    counted: int
    finish: Finish | None
    refusal: str


class Arrival(NamedTuple):
    """The hooks that are called when a request comes."""

    facts_of: tuple[Callable[[AddRequest, WorkerFacts], WorkerFacts], ...]
    refuse: tuple[Callable[[AddRequest], str | None], ...]
    lacks_room: tuple[Callable[[AddRequest], str | None], ...]
    enter: tuple[Callable[[Sequence], None], ...]
    forecast: tuple[Callable[[Sequence, float], Tokens | Failed | None], ...]


_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Feature)


class Hooks:
    """For each moment, the hooks of the features that do something then, in their order."""

    def __init__(self) -> None:
        self._resting: set[Feature] = set()
        """Features with nothing to do, of which hooks of each step are not called."""
        self._arrivals: dict[tuple[bool, ...], Arrival] = {}
        """The hooks for a new request, by what it asks for."""
        self.install(())

    def install(self, features: Iterable[Feature]) -> None:
        self.features = tuple(features)
        names = [name for each in self.features for name in each.asked_by]
        self._asked = attrgetter("grammar", "alone", *names)  # of two names at least: it returns a tuple then
        self.may_pause = self._overriding(Feature.may_pause)
        self.waits_for_landing = self._overriding(Feature.waits_for_landing)
        self.choose = self._overriding(Feature.choose)
        self.may_run = self._overriding(Feature.may_run)
        self.fits = self._overriding(Feature.fits)
        self.divert = self._overriding(Feature.divert)
        self.begin_step = self._overriding(Feature.begin_step)
        self.least = self._overriding(Feature.least)
        self.reach = self._overriding(Feature.reach)
        self.admit = self._overriding(Feature.admit)
        self.add_row = self._overriding(Feature.add_row)
        self.complete = self._overriding(Feature.complete)
        self.release = self._overriding(Feature.release)
        self.bind = self._overriding(Feature.bind)
        self.forced = self._overriding(Feature.forced)
        self.fitting = self._overriding(Feature.fitting)
        self.take = self._overriding(Feature.take)
        self.arrive = self._overriding(Feature.arrive)
        self.report = self._overriding(Feature.report)
        self.fail_step = self._overriding(Feature.fail_step)
        self.work_idle = self._overriding(Feature.work_idle)
        self.stop = self._overriding(Feature.stop)
        self.forget_prefixes = self._overriding(Feature.forget_prefixes)
        self.add_stats = self._overriding(Feature.add_stats)
        self._install_each()

    def _install_each(self) -> None:
        """Install what features are called for only while they have something to do."""
        self._arrivals.clear()
        self.leave = self._awake(Feature.leave)
        self.may_begin = self._awake(Feature.may_begin)
        self.finish = self._awake(Feature.finish)
        self.land_step = self._awake(Feature.land_step)
        self.poll = self._awake(Feature.poll)
        self.next_time = self._awake(Feature.next_time)
        self.waits = self._awake(Feature.waits)
        self.work_beside = self._awake(Feature.work_beside)

    def at_arrival(self, request: AddRequest) -> Arrival:
        """Find the hooks for a new request: of features that rest, only those for which it asks."""
        asked = tuple(map(bool, self._asked(request)))
        found = self._arrivals.get(asked)
        if found is None:
            found = self._arrivals[asked] = self._arrival(request)
        return found

    def _arrival(self, request: AddRequest) -> Arrival:
        hear: list[Feature] = []
        for each in self.features:
            rests = each.asked_by and each in self._resting
            if not rests or any(getattr(request, name) for name in each.asked_by):
                hear.append(each)
        return Arrival(
            _of(hear, Feature.facts_of),
            _of(hear, Feature.refuse),
            _of(hear, Feature.lacks_room),
            _of(hear, Feature.enter),
            _of(hear, Feature.forecast),
        )

    def rest(self, feature: Feature) -> None:
        """Call no hooks of each step of a feature that has nothing to do, until it wakes."""
        if feature not in self._resting:
            self._resting.add(feature)
            self._install_each()

    def wake(self, feature: Feature) -> None:
        if feature in self._resting:
            self._resting.remove(feature)
            self._install_each()

    def find(self, kind: type[_F]) -> _F | None:
        """Find the installed feature of a class, for whoever owns the engine."""
        return next((each for each in self.features if isinstance(each, kind)), None)

    def get(self, kind: type[_F]) -> _F:
        """Get the feature of a class that is always installed."""
        return next(each for each in self.features if isinstance(each, kind))

    def _overriding(self, hook: Callable[Concatenate[Any, _P], _R]) -> tuple[Callable[_P, _R], ...]:
        return _of(self.features, hook)

    def _awake(self, hook: Callable[Concatenate[Any, _P], _R]) -> tuple[Callable[_P, _R], ...]:
        return _of([each for each in self.features if each not in self._resting], hook)


def _of(
    features: Iterable[Feature], hook: Callable[Concatenate[Any, _P], _R]
) -> tuple[Callable[_P, _R], ...]:
    """The hook of each of these features that overrides it."""
    name = hook.__name__
    return tuple([getattr(each, name) for each in features if getattr(type(each), name) is not hook])
