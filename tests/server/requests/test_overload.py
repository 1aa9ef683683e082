"""Refusing requests while the queue is full."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from server.errors import Overloaded
from server.requests import overload
from server.requests.overload import DEFAULT_QUEUE, FIRST_GUESS, MAX_WAIT, OverloadGuard


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(overload, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize(
    ("new", "live", "reported", "refused"),
    [
        (1, 5, 0, False),  # 4 slots: one of them waits, and so would the new one
        (1, 6, 0, True),
        (3, 4, 0, True),
        (1, 0, 1, False),  # the engine waits for cache while slots are free
        (1, 0, 2, True),
        (9, 0, 0, True),
    ],
)
def test_requests_beyond_the_limit_are_refused(new: int, live: int, reported: int, refused: bool) -> None:
    refusals: list[None] = []
    guard = OverloadGuard(2, lambda: refusals.append(None))
    if refused:
        with pytest.raises(Overloaded):
            guard.check(new, live, slots=4, reported=reported)
    else:
        guard.check(new, live, slots=4, reported=reported)
    assert len(refusals) == refused


def test_the_queue_has_a_limit_if_none_is_given() -> None:
    guard = OverloadGuard(None, lambda: None)
    guard.check(1, DEFAULT_QUEUE - 1, slots=0, reported=0)
    with pytest.raises(Overloaded):
        guard.check(1, DEFAULT_QUEUE, slots=0, reported=0)


def test_the_time_to_wait_follows_the_rate_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    guard = OverloadGuard(0, lambda: None)
    assert guard.seconds_until_free(9) == FIRST_GUESS
    for _ in range(10):
        guard.note_finished()
        clock.now += 0.5
    assert guard.seconds_until_free(8) == 4
    assert guard.seconds_until_free(1) == 1
    assert guard.seconds_until_free(10_000) == MAX_WAIT
    with pytest.raises(Overloaded) as caught:
        guard.check(1, 7, slots=0, reported=0)
    assert caught.value.headers() == {"Retry-After": "4"}
