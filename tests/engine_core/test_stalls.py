"""When a process counts as stalled or hopeless, and what the watcher does then. Processes are fake."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from engine_core import stalls
from engine_core.stalls import (
    KILL_SECONDS,
    LATE_SECONDS,
    STALL_SECONDS,
    ProgressRules,
    State,
    describe,
    watch,
)
from worker.child import Child
from worker.host.progress_page import IDLE, STARTING, WORKING, Entry, ProgressPage, ProgressWriter


class FakeProcess:
    """A process that is killed at most, and whose id nobody has."""

    pid = 1 << 30

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self.killed_because = ""
        self.exit_code: int | None = None

    def kill(self) -> None:
        self.killed.set()


class Kept:
    """A process that is watched, and that writes what a test wants."""

    def __init__(self, path: Path) -> None:
        self.name = "the engine"
        self._path = path
        self.start()

    def start(self) -> None:
        self.page = ProgressPage(self._path)
        self.fake = FakeProcess()
        self.process = cast(Child, self.fake)
        self.writer = ProgressWriter(str(self._path))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(stalls, "DUMP_SECONDS", 0.01)
    monkeypatch.setattr(stalls, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(stalls, "KILL_SECONDS", 1000.0)


@pytest_asyncio.fixture
async def kept(tmp_path: Path, hurried: None) -> Kept:
    return Kept(tmp_path / "engine-0.progress")


@pytest_asyncio.fixture
async def told(kept: Kept) -> AsyncIterator[list[bool]]:
    """What is said of the process, which is watched while the test runs."""
    told: list[bool] = []

    def note(one: Kept, stalled: bool) -> None:
        told.append(stalled)

    watching = asyncio.create_task(watch([kept], note, leaving=lambda: False))
    yield told
    watching.cancel()


async def soon(told: list[Any], expected: list[Any]) -> None:
    async with asyncio.timeout(60):
        while told[: len(expected)] != expected:  # what comes later does not matter
            await asyncio.sleep(0.005)


async def test_a_stall_is_told_and_its_end(
    kept: Kept, told: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kept.writer.write(WORKING, 1, 20, 5.0, 0.0)
        await soon(told, [True])
        kept.writer.write(WORKING, 2, 20, 6.0, 0.0)
        await soon(told, [True, False])
        kept.writer.idle()
    assert f"process {os.getpid()} computes step 1, of 20 tokens" in caplog.text
    assert "the engine makes progress again" in caplog.text
    assert not kept.fake.killed.is_set()


async def test_whoever_hangs_for_long_is_killed_and_another_one_begins_anew(
    kept: Kept, told: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "KILL_SECONDS", 0.1)
    kept.writer.write(WORKING, 1, 20, 5.0, 0.0)
    first = kept.fake
    await asyncio.wait_for(first.killed.wait(), 60)
    assert first.killed_because == "it made no progress and was killed"
    assert told == [True]
    kept.start()
    await soon(told, [True, False])
    kept.writer.idle()
    await asyncio.sleep(0.1)
    assert told == [True, False] and not kept.fake.killed.is_set()


async def test_one_that_has_ended_while_it_worked_is_not_blamed(kept: Kept, told: list[bool]) -> None:
    kept.writer.write(WORKING, 1, 20, 5.0, 0.0)
    kept.fake.exit_code = 1
    await asyncio.sleep(0.2)
    assert told == [] and not kept.fake.killed.is_set()


async def test_a_start_that_hangs_is_ended(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    watching = asyncio.create_task(
        watch([kept], lambda one, stalled: None, leaving=lambda: False, start_seconds=0.1)
    )
    await asyncio.wait_for(kept.fake.killed.wait(), 60)
    watching.cancel()
    reason = "it showed no progress of its start for 0.1 s (--engine-ready-timeout)"
    assert str(kept.fake.killed_because).startswith(f"{reason} and was killed: what it waits for")
    assert f"the engine: {reason}; it is killed" in caplog.text


async def test_one_that_loads_is_left_alone(kept: Kept, told: list[bool]) -> None:
    await asyncio.sleep(0.2)
    assert told == [] and kept.page.read(0).pid == 0


TICK = 0.5
STEP = Entry(7, WORKING, number=3, tokens=20, since=100.0, usual=0.1)
NOTHING = Entry(7, IDLE)


class Script:
    """A process that is looked at every TICK seconds."""

    def __init__(
        self, entry: Entry, *, stopped: bool = False, leaving: bool = False, start_seconds: float = inf
    ) -> None:
        self.entry, self.stopped, self.leaving = entry, stopped, leaving
        self.watch = ProgressRules(start_seconds)
        self.look(0.0)

    def look(self, elapsed: float = TICK) -> State:
        return self.watch.look(elapsed, [self.entry], stopped=self.stopped, leaving=self.leaving)

    def until(self, state: State, most: float = 1000.0) -> float:
        """The seconds until this state; infinity if it does not come."""
        seconds = 0.0
        while seconds < most:
            seconds += TICK
            if self.look() is state:
                return seconds
        return inf


def test_a_step_without_end_is_seen_and_given_up() -> None:
    script = Script(STEP)
    stalled = script.until(State.STALLED)
    assert stalled == STALL_SECONDS
    assert stalled + script.until(State.HOPELESS) == KILL_SECONDS


@pytest.mark.parametrize("entry", [NOTHING, Entry(7, STARTING)])
def test_who_has_nothing_to_do_or_loads_is_never_blamed(entry: Entry) -> None:
    assert Script(entry).until(State.STALLED) == inf


@pytest.mark.parametrize("entry", [NOTHING, STEP])
def test_who_is_stopped_makes_no_progress_whatever_it_does(entry: Entry) -> None:
    script = Script(entry, stopped=True)
    assert script.until(State.STALLED) == STALL_SECONDS
    script.stopped = False
    assert entry is STEP or script.look() is State.WELL


def test_a_start_has_an_end_if_it_does_not_go_on() -> None:
    script = Script(Entry(0, STARTING), start_seconds=600.0)
    assert script.until(State.HOPELESS, 599.0) == inf
    script.entry = Entry(7, STARTING, number=1)
    assert script.look() is State.WELL
    assert script.until(State.HOPELESS) == 600.0


def test_one_that_loads_may_be_stopped() -> None:
    assert Script(Entry(7, STARTING), stopped=True).until(State.STALLED) == inf


@pytest.mark.parametrize("change", [{"number": 4}, {"since": 101.0}, {"pid": 8}, {"state": IDLE}])
def test_any_progress_is_enough(change: dict[str, float]) -> None:
    script = Script(STEP)
    script.until(State.STALLED)
    script.entry = STEP._replace(**change)
    assert script.look() is State.WELL and script.watch.quiet == 0


def test_steps_that_go_on_slowly_are_well() -> None:
    script = Script(STEP)
    for number in range(50):
        script.entry = STEP._replace(number=number)
        for _ in range(8):
            assert script.look() is State.WELL


def test_a_step_may_take_as_long_as_those_of_its_size_do() -> None:
    script = Script(STEP._replace(usual=20.0))
    stalled = script.until(State.STALLED)
    assert stalled == 40.0 and stalled + script.until(State.HOPELESS) == 200.0


def test_a_watcher_that_did_not_run_itself_blames_nobody() -> None:
    script = Script(STEP)
    script.until(State.STALLED)
    for _ in range(3):
        assert script.look(3600.0) is State.WELL
    assert script.until(State.STALLED) == STALL_SECONDS
    slow = Script(STEP)
    assert {slow.look(LATE_SECONDS + 0.1) for _ in range(100)} == {State.WELL}


def test_a_server_that_leaves_waits_neither_for_the_stopped_nor_for_the_stalled() -> None:
    assert Script(NOTHING, stopped=True, leaving=True).look() is State.HOPELESS
    assert Script(STEP, leaving=True).until(State.HOPELESS) == STALL_SECONDS
    assert Script(NOTHING, leaving=True).until(State.HOPELESS) == inf


def test_the_log_names_what_each_process_does() -> None:
    told = describe([STEP, Entry(8, IDLE), Entry(9, WORKING, 3, 20)], {9})
    assert told == (
        "process 7 computes step 3, of 20 tokens, process 8 has nothing to do, "
        "process 9 computes step 3, of 20 tokens and is stopped"
    )
