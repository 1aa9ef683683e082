"""Every request that is in the server can be told from all others by its id."""

from __future__ import annotations

from server.access.requests_by_id import RequestsById


def test_an_id_is_free_until_it_is_taken_and_again_when_it_is_dropped() -> None:
    ids = RequestsById[int]()
    assert ids.free("a") == "a"
    ids.put("a", 1)
    other = ids.free("a")
    assert other != "a" and other.startswith("a-") and ids.free("a") != other
    ids.put(other, 2)
    assert list(ids.find(["a", "b", other])) == [1, 2]
    ids.drop("a", 1)
    assert ids.free("a") == "a" and list(ids.find(["a"])) == []


def test_programs_may_give_several_the_same() -> None:
    ids = RequestsById[int]()
    for request in (1, 2):
        ids.put("a", request)
    assert list(ids.find(["a"])) == [1, 2]
    ids.drop("a", 1)
    assert list(ids.find(["a"])) == [2]
