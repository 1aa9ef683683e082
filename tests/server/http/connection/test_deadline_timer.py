"""The one timer of all connections."""

import random

import pytest
from fake_connection import FakeClock

from server.http.connection.deadline_timer import LATE, MOST_AT_ONCE, NEVER, TICK, DeadlineTimer


class Waiter:
    def __init__(self, clock: FakeClock) -> None:
        self.due = NEVER
        self.clock = clock
        self.expired: list[float] = []

    def expire(self) -> None:
        self.expired.append(self.clock.now)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def timer(clock: FakeClock) -> DeadlineTimer:
    return DeadlineTimer(clock.time, clock.call_later)


def test_a_deadline_is_noticed_soon_after_it_and_once(clock: FakeClock, timer: DeadlineTimer) -> None:
    waiters = [Waiter(clock) for _ in range(50)]
    for i, waiter in enumerate(waiters):
        timer.set(waiter, 0.1 + i / 10)
    timer.set(gone := Waiter(clock), 5)
    timer.forget(gone)
    assert len(timer) == 50
    clock.advance(20)
    assert gone.expired == []
    for i, waiter in enumerate(waiters):
        [at] = waiter.expired
        assert 0 <= at - (1000.1 + i / 10) <= 2 * TICK
    assert len(timer) == 0
    assert clock.timers == []  # nobody waits, so nothing is to be looked at


def test_a_waiter_may_get_a_deadline_while_it_is_looked_at(clock: FakeClock, timer: DeadlineTimer) -> None:
    class Again(Waiter):
        def expire(self) -> None:
            super().expire()
            timer.set(self, 1)

    waiter = Again(clock)
    timer.set(waiter, 1)
    clock.advance(10)
    assert 6 <= len(waiter.expired) <= 10
    assert len(clock.timers) == 1


def test_very_many_are_acted_on_in_turns(clock: FakeClock, timer: DeadlineTimer) -> None:
    waiters = [Waiter(clock) for _ in range(3 * MOST_AT_ONCE)]
    for waiter in waiters:
        timer.set(waiter, 1)
    most = 0
    for _ in range(40):
        before = sum(len(waiter.expired) for waiter in waiters)
        clock.advance(TICK / 2)
        most = max(most, sum(len(waiter.expired) for waiter in waiters) - before)
    assert most == MOST_AT_ONCE
    assert all(len(waiter.expired) == 1 for waiter in waiters)


def test_after_a_loop_that_stood_still_clients_are_read_first(clock: FakeClock, timer: DeadlineTimer) -> None:
    waiter = Waiter(clock)
    timer.set(waiter, 1)
    clock.advance(TICK)
    clock.now += 2 + LATE
    clock.advance(TICK / 2)
    assert waiter.expired == []
    clock.advance(2 * TICK)
    assert len(waiter.expired) == 1


def test_a_loop_that_always_lags_ends_them_too(clock: FakeClock, timer: DeadlineTimer) -> None:
    waiter = Waiter(clock)
    timer.set(waiter, 1)
    for _ in range(4):
        clock.now += 2 * LATE
        clock.advance(TICK / 2)
    assert len(waiter.expired) == 1


def test_random_changes(clock: FakeClock, timer: DeadlineTimer) -> None:
    rng = random.Random(1)
    waiters = [Waiter(clock) for _ in range(30)]
    due = dict.fromkeys(waiters, NEVER)
    for _ in range(3000):
        waiter = rng.choice(waiters)
        if rng.random() < 0.7:
            seconds = rng.choice([0.3, 1, 5, 40])
            timer.set(waiter, seconds)
            due[waiter] = clock.now + seconds
        else:
            timer.forget(waiter)
            if rng.random() < 0.5:
                timer.set(waiter, 1)
                waiter.due = NEVER  # as a connection does for which nothing is waited
            due[waiter] = NEVER
        clock.advance(rng.choice([0, 0.1, 1]))
        for one in waiters:
            if one.expired:
                assert due[one] <= one.expired.pop()
                due[one] = NEVER
                assert one.expired == []
            assert due[one] > clock.now - 3 * TICK
