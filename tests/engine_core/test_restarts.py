"""Processes that end are started again within a budget: a test ends fake children, and has the clock."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from started_engines import soon, until

from engine_core import restarts
from engine_core.config import Replicas
from engine_core.engine_children import EngineProcesses
from engine_core.restarts import LONGEST_PAUSE, PAUSES, WINDOW, RestartBudget, Restarter
from engine_core.run_folder import RunFolder
from worker.child import BROKE, CANNOT_START, STOPPED, describe_exit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_ends_within_ten_minutes_cost_longer_and_longer_pauses() -> None:
    clock = Clock()
    budget = RestartBudget(clock)
    pauses: list[float | None] = []
    for _ in range(6):
        pauses.append(budget.spend())
        clock.now += 60
    assert pauses == [0.0, 0.5, 2.0, 4.0, 8.0, None]


def test_an_end_is_forgotten_after_ten_minutes() -> None:
    clock = Clock()
    budget = RestartBudget(clock)
    for _ in range(20):
        assert budget.spend() == PAUSES[0]
        clock.now += WINDOW
    budget.spend()
    clock.now += WINDOW / 2
    assert budget.spend() == PAUSES[1]
    clock.now += WINDOW / 2
    assert budget.spend() == PAUSES[1], "the older of the two does not count any more"


def test_ends_for_want_of_memory_cost_pauses_and_give_nothing_up() -> None:
    clock = Clock()
    budget = RestartBudget(clock)
    pauses: list[float | None] = []
    for _ in range(9):
        pauses.append(budget.spend(by_memory=True))
        clock.now += 1
    assert pauses == [0.0, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE, LONGEST_PAUSE]
    assert [budget.spend() for _ in range(6)] == [LONGEST_PAUSE] * 5 + [None], "others count alone"


class FakeProcess:
    """A process that ends when the test says so."""

    def __init__(self) -> None:
        self.sentinel, self._other_end = os.pipe()
        self.killed_because = ""
        self._code = 0

    def end(self, code: int) -> None:
        self._code = code
        os.close(self._other_end)

    def wait(self) -> int:
        os.close(self.sentinel)
        return self._code


class FakeKept:
    """A process that is kept, and all that were started in its place."""

    name = "the child"

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.errors: list[OSError] = []
        self.start()

    def start(self) -> None:
        if self.errors:
            raise self.errors.pop()
        self.started.append(FakeProcess())

    @property
    def process(self) -> FakeProcess:
        return self.started[-1]


Keep = Callable[..., tuple[Restarter, asyncio.Task[tuple[int, str]]]]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> FakeKept:
    monkeypatch.setattr(restarts, "PAUSES", (0.0, 0.01, 0.01))
    return FakeKept()


@pytest_asyncio.fixture
async def keep(kept: FakeKept) -> AsyncIterator[Keep]:
    """A function that begins to keep the fake process."""
    tasks: list[asyncio.Task[tuple[int, str]]] = []

    def begin(may_return: Callable[[int], bool] = lambda code: True, **hooks: Callable[..., None]):
        made = Restarter(kept, may_return=may_return, **hooks)  # pyright: ignore[reportArgumentType]
        tasks.append(asyncio.create_task(made.keep_running()))
        return made, tasks[-1]

    yield begin
    for task in tasks:
        task.cancel()


async def test_a_process_is_started_again_until_its_budget_is_spent(kept: FakeKept, keep: Keep) -> None:
    codes: list[int] = []
    states: list[tuple[bool, bool]] = []
    made, keeping = keep(on_exit=codes.append, on_change=lambda: states.append((made.runs, made.given_up)))
    for count in range(1, 4):
        kept.process.end(-9)
        await soon(until(lambda count=count: len(kept.started) == count + 1))
    kept.process.end(BROKE)
    code, reason = await asyncio.wait_for(keeping, 60)
    assert code == BROKE
    assert (
        reason
        == "the child ended 4 times in 10 minutes, at last so: it exited with code 1, and its log says why"
    )
    assert codes == [-9, -9, -9, BROKE]
    running, paused, over = (True, False), (False, False), (False, True)
    assert states == [running, paused, running, paused, running, over], "the first restart was at once"


async def test_one_that_the_system_kills_for_want_of_memory_is_never_given_up(
    kept: FakeKept, keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kills = 3
    monkeypatch.setattr(restarts, "kills_for_memory", lambda: kills)
    monkeypatch.setattr(restarts, "LONGEST_PAUSE", 0.01)
    made, keeping = keep()
    for count in range(1, 9):
        kills += 1
        kept.process.end((-9, BROKE)[count % 2])
        await soon(until(lambda count=count: len(kept.started) == count + 1))
    assert not made.given_up and "memory ran out, and the system has killed it" in caplog.text
    for _ in range(4):  # of another cause: nobody was killed for memory
        await soon(until(lambda: made.runs))
        kept.process.end(-9)
        before = len(kept.started)
        await soon(until(lambda before=before: len(kept.started) > before or keeping.done()))
    assert made.given_up


async def test_one_that_would_end_again_is_not_started(kept: FakeKept, keep: Keep) -> None:
    made, keeping = keep(may_return=lambda code: code != CANNOT_START)
    kept.process.end(CANNOT_START)
    assert await asyncio.wait_for(keeping, 60) == (CANNOT_START, "")
    assert not made.runs and not made.given_up and len(kept.started) == 1


async def test_a_start_that_fails_is_tried_again(
    kept: FakeKept, keep: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    keep()
    kept.errors = [OSError(12, "Cannot allocate memory")]
    kept.process.end(-9)
    await soon(until(lambda: len(kept.started) == 2))
    assert [record.message for record in caplog.records] == [
        f"the child has ended: {describe_exit(-9)}; it is started again",
        "the child has ended: it cannot be started: Cannot allocate memory; it is started again in 0.01 s",
    ]


class FakeEngine:
    """An engine of a group, whose next start may fail."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"engine {number}"
        self.starts = 1
        self.fails = False
        self.killed = False
        self.process = self

    def start(self) -> None:
        self.starts += 1
        self.killed = False
        if self.fails:
            raise OSError(12, "Cannot allocate memory")

    def kill(self) -> None:
        self.killed = True


class Group:
    """Engines that share experts."""

    def __init__(self, size: int, folder: RunFolder, first: int = 0) -> None:
        layout = Replicas(size=first + size, first=first, here=size, together=True)
        self.engines = EngineProcesses(self.make, folder, [], layout)
        self.group: Any = restarts._EngineGroup(self.engines, self)  # pyright: ignore[reportPrivateUsage]

    def make(self, number: int) -> Any:
        return FakeEngine(number)

    def engine_given_up(self, number: int, reason: str, *, explained: bool) -> None:
        pass

    def engine_exited(self, number: int, code: int) -> None:
        pass

    def engine_stalled(self, number: int, stalled: bool) -> None:
        pass

    @property
    def known(self) -> list[Any]:
        return [*self.engines.engines]


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    made = RunFolder()
    yield made
    made.remove()


def test_a_group_that_cannot_be_started_whole_meets_in_one_place_the_next_time(folder: RunFolder) -> None:
    made = Group(3, folder)
    made.known[1].fails = True
    with pytest.raises(OSError, match="Cannot allocate memory"):
        made.group.start()
    assert all(engine.killed for engine in made.known)
    assert {engine.starts for engine in made.known} == {2}


@pytest.mark.parametrize(("first", "expected"), [(0, [STOPPED]), (1, [STOPPED, STOPPED, BROKE])])
async def test_engines_that_leave_with_the_first_one_wait_for_the_next(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, first: int, expected: list[int]
) -> None:
    """The first one is on this machine, or on another; an end that is told is one that counts."""
    made, codes = Group(1, folder, first), [*expected]

    async def next_code(process: object) -> int:
        return codes.pop(0)

    monkeypatch.setattr(restarts, "exit_of", next_code)
    assert await made.group.next_end() == expected[-1]
    assert not codes and [engine.starts for engine in made.known] == [len(expected)]
