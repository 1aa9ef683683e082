"""Refusing requests while the queue is full."""

from __future__ import annotations

from typing import Any

import pytest
from model_facts import READY

from engine_core.client.replica import Replica
from engine_core.protocol import Stats
from server.errors import Overloaded
from server.requests.overload import DEFAULT_QUEUE, FIRST_GUESS, MAX_WAIT, OverloadGuard


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
    guard = OverloadGuard(2, lambda: refusals.append(None), list)
    if refused:
        with pytest.raises(Overloaded):
            guard.check(new, live, slots=4, reported=reported)
    else:
        guard.check(new, live, slots=4, reported=reported)
    assert len(refusals) == refused


def test_the_queue_has_a_limit_if_none_is_given() -> None:
    guard = OverloadGuard(None, lambda: None, list)
    guard.check(1, DEFAULT_QUEUE - 1, slots=0, reported=0)
    with pytest.raises(Overloaded):
        guard.check(1, DEFAULT_QUEUE, slots=0, reported=0)


def replica(number: int, expected_wait: float, **state: Any) -> Replica:
    one = Replica(number)
    one.ready, one.connected, one.reachable = READY, True, True
    one.stats = Stats(1, 1, 0.5, 0, 0, 0, 0, 0, expected_wait=expected_wait)
    for name, value in state.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("replicas", "seconds"),
    [
        ([replica(0, 3.2), replica(1, 7.0)], 4),
        ([replica(0, 3.2, leaving=True), replica(1, 7.0)], 7),  # the first takes no requests
        ([replica(0, 0.0), replica(1, 7.0)], 7),  # the first has not said anything yet
        ([replica(0, 0.001)], 1),
        ([replica(0, 1000.0)], MAX_WAIT),
        ([replica(0, 0.0)], FIRST_GUESS),
        ([replica(0, 0.0, stats=None)], FIRST_GUESS),
        ([], FIRST_GUESS),
    ],
)
def test_the_time_to_wait_is_the_shortest_that_an_engine_expects(
    replicas: list[Replica], seconds: int
) -> None:
    guard = OverloadGuard(0, lambda: None, lambda: replicas)
    with pytest.raises(Overloaded) as caught:
        guard.check(1, 7, slots=0, reported=0)
    assert caught.value.headers() == {"Retry-After": str(seconds)}
