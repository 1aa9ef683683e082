"""The choice of a replica for a request, from tokens and numbers alone."""

from __future__ import annotations

from collections import Counter

from engine_core.client.routing import BLOCK, LONGEST, Router

IDLE = {0: 0, 1: 0, 2: 0}


def prompt(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + BLOCK * blocks))


def test_the_least_busy_one_is_chosen_and_equals_take_turns() -> None:
    router = Router()
    assert router.choose([1], {0: 5, 1: 2, 2: 9}) == (1, 1)
    assert Counter(router.choose([1], IDLE)[0] for _ in range(9)) == {0: 3, 1: 3, 2: 3}


def test_a_prefix_is_followed_as_far_as_it_saves_work() -> None:
    router = Router()
    text = prompt(4)
    home, cost = router.choose(text, {0: 0, 1: 0})
    assert cost == 4 * BLOCK
    assert router.choose([*text, 1, 2], {home: 4 * BLOCK - 1, 1 - home: 0}) == (home, 2)
    assert router.choose(text, {home: 4 * BLOCK + 1, 1 - home: 0}) == (1 - home, 4 * BLOCK)


def test_a_prefix_may_be_at_home_in_several_places() -> None:
    router = Router()
    text = prompt(3)
    first, _ = router.choose(text, {0: 0, 1: 0})
    router.choose(text, {first: 1000, 1 - first: 0})
    assert router.choose(text, {0: 0, 1: 5}) == (0, 0)
    assert router.choose(text, {0: 5, 1: 0}) == (1, 0)


def test_only_what_begins_alike_and_has_the_same_salt_is_shared() -> None:
    router = Router()
    text = prompt(2)
    home, _ = router.choose(text, {0: 0, 1: 0}, salt="a")
    other = 1 - home
    assert router.choose(text, {home: 1, other: 0}, salt="b") == (other, 2 * BLOCK)
    assert router.choose([7, *text], {home: 1, other: 0}, salt="a") == (other, 2 * BLOCK + 1)
    assert router.choose([*text, 7], {home: 1, other: 0}, salt="a") == (home, 1)


def test_what_leaves_nothing_behind_is_not_remembered() -> None:
    router = Router()
    text = prompt(2)
    home, _ = router.choose(text, {0: 0, 1: 0}, remember=False)
    assert router.choose(text, {home: 1, 1 - home: 0}) == (1 - home, 2 * BLOCK)


def test_the_memory_is_bounded_and_keeps_the_beginnings_longest() -> None:
    router = Router()
    router.remembered = 4
    text = prompt(6)
    home, _ = router.choose(text, {0: 0, 1: 0})
    assert router.choose(text, {home: 1, 1 - home: 0}) == (home, 2 * BLOCK)
    endless = prompt(LONGEST + 10)
    router.remembered = 10_000
    home, _ = router.choose(endless, {0: 0, 1: 0})
    assert router.choose(endless, {home: 1, 1 - home: 0}) == (home, 10 * BLOCK)


def test_a_dead_replica_is_forgotten() -> None:
    router = Router()
    text = prompt(2)
    home, _ = router.choose(text, {0: 0, 1: 0})
    router.forget([home])
    assert router.choose(text, {home: 1, 1 - home: 0}) == (1 - home, 2 * BLOCK)
    assert router.choose(text, {home: 2 * BLOCK + 1, 1 - home: 2 * BLOCK}) == (1 - home, 0)
