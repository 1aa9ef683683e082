"""A caller of which only so many answers may wait: what runs, or could, does not count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from engine_core.protocol import Stats
from server.access.admission import Admissions
from server.access.client_identity import Caller
from server.errors import BadRequest, TooManyRequests

SLOTS = 4
OTHER = Caller("other")


@dataclass
class Engines:
    stats: Stats | None = None
    aborted: list[int] = field(default_factory=list)

    def abort(self, ids: Iterable[int], /) -> None:
        self.aborted += ids


@pytest.fixture
def house() -> Admissions:
    admissions = Admissions(1000, None, Engines(), lambda: None)
    admissions.slots = SLOTS
    return admissions


def test_so_many_wait_behind_those_that_run(house: Admissions) -> None:
    alice = Caller("alice", max_queued=2)
    live = [house.admit(alice, 1) for _ in range(SLOTS + 2)]
    for refused in (house.check_room, house.take_free_place, lambda caller: house.admit(caller, 1)):
        with pytest.raises(TooManyRequests, match="2 answers may wait at most") as caught:
            refused(alice)
        assert caught.value.body()["error"]["code"] == "rate_limit_exceeded"  # type: ignore[index]
        assert int(caught.value.headers()["Retry-After"]) >= 1
    house.admit(OTHER, 50)
    live[0].release()
    with pytest.raises(TooManyRequests):
        house.admit(alice, 1)  # others have the slots now


def test_without_a_queue_it_may_still_run(house: Admissions) -> None:
    alice = Caller("alice", max_running=2, max_queued=0)
    first = house.admit(alice, 2)
    with pytest.raises(TooManyRequests):
        house.admit(alice, 1)
    first.release()
    assert house.take_free_place(alice) is not None


def test_what_has_begun_does_not_wait_though_others_came(house: Admissions) -> None:
    alice = Caller("alice", max_queued=1)
    house.admit(alice, 2).begin_work(1).begin()
    house.admit(OTHER, 100)
    house.admit(alice, 1)
    with pytest.raises(TooManyRequests):
        house.admit(alice, 1)


def test_a_place_that_is_taken_at_the_head_counts_once(house: Admissions) -> None:
    alice = Caller("alice", max_running=1, max_queued=2)
    taken = house.take_free_place(alice)
    assert taken is not None
    assert house.admit(alice, 3, taken).count == 3
    with pytest.raises(TooManyRequests):
        house.check_room(alice)


def test_what_could_never_wait_is_told_so(house: Admissions) -> None:
    with pytest.raises(BadRequest, match="your API key may have 3 at most"):
        house.admit(Caller("alice", max_running=1, max_queued=2), 4)
    assert house.most_for(OTHER) == house.most


def test_others_have_no_queue_of_their_own(house: Admissions) -> None:
    house.admit(Caller("alice", max_queued=0), SLOTS)
    house.admit(OTHER, 500)
