"""When a process counts as stalled and as hopeless, by a scripted clock."""

from __future__ import annotations

from math import inf

import pytest

from engine_core.watch.rules import KILL_SECONDS, LATE_SECONDS, STALL_SECONDS, State, Watch, describe
from worker.host.progress_page import IDLE, STARTING, WORKING, Entry

TICK = 0.5
STEP = Entry(7, WORKING, number=3, tokens=20, since=100.0, usual=0.1)
NOTHING = Entry(7, IDLE)


class Script:
    """A process that is looked at every TICK seconds."""

    def __init__(self, entry: Entry, *, stopped: bool = False, leaving: bool = False) -> None:
        self.entry, self.stopped, self.leaving = entry, stopped, leaving
        self.watch = Watch()
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
