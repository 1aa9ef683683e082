"""The choice of a replica for a request, and how late-interaction queries meet their documents."""

from collections import Counter

import pytest
from fake_media import picture
from msgspec.structs import replace
from scripted_engine import Connect, Replicated, Two

from engine_core.client import replica_routing
from engine_core.client.in_flight import Stream
from engine_core.client.replica_routing import BLOCK, LONGEST, LateQueries, ReplicaRouter
from engine_core.prompt_media import Media
from engine_core.protocol import AddRequest, AddRequests, Outputs, Pooled, Request
from worker.protocol import Pooling, Vectors

IDLE = {0: 0, 1: 0, 2: 0}


def prompt(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + BLOCK * blocks))


def choose(
    router: ReplicaRouter,
    tokens: list[int],
    loads: dict[int, int],
    *,
    salt: str = "",
    remember: bool = True,
    media: tuple[Media, ...] = (),
) -> tuple[int, int]:
    add = AddRequest(id=1, tokens=tokens, params=QUERY, salt=salt, media=media)
    return router.choose(add, loads, remember=remember)


def test_the_least_busy_one_is_chosen_and_equals_take_turns() -> None:
    router = ReplicaRouter()
    assert choose(router, [1], {0: 5, 1: 2, 2: 9}) == (1, 1)
    assert Counter(choose(router, [1], IDLE)[0] for _ in range(9)) == {0: 3, 1: 3, 2: 3}


def test_a_prefix_is_followed_as_far_as_it_saves_work() -> None:
    router = ReplicaRouter()
    text = prompt(4)
    home, cost = choose(router, text, {0: 0, 1: 0})
    assert cost == 4 * BLOCK
    assert choose(router, [*text, 1, 2], {home: 4 * BLOCK - 1, 1 - home: 0}) == (home, 2)
    assert choose(router, text, {home: 4 * BLOCK + 1, 1 - home: 0}) == (1 - home, 4 * BLOCK)


def test_a_prefix_may_be_at_home_in_several_places() -> None:
    router = ReplicaRouter()
    text = prompt(3)
    first, _ = choose(router, text, {0: 0, 1: 0})
    choose(router, text, {first: 1000, 1 - first: 0})
    assert choose(router, text, {0: 0, 1: 5}) == (0, 0)
    assert choose(router, text, {0: 5, 1: 0}) == (1, 0)


def test_only_what_begins_alike_and_has_the_same_salt_is_shared() -> None:
    router = ReplicaRouter()
    text = prompt(2)
    home, _ = choose(router, text, {0: 0, 1: 0}, salt="a")
    other = 1 - home
    assert choose(router, text, {home: 1, other: 0}, salt="b") == (other, 2 * BLOCK)
    assert choose(router, [7, *text], {home: 1, other: 0}, salt="a") == (other, 2 * BLOCK + 1)
    assert choose(router, [*text, 7], {home: 1, other: 0}, salt="a") == (home, 1)


def test_what_leaves_nothing_behind_is_not_remembered() -> None:
    router = ReplicaRouter()
    text = prompt(2)
    home, _ = choose(router, text, {0: 0, 1: 0}, remember=False)
    assert choose(router, text, {home: 1, 1 - home: 0}) == (1 - home, 2 * BLOCK)


def test_requests_about_different_pictures_do_not_follow_each_other() -> None:
    router, text, length = ReplicaRouter(), prompt(3), BLOCK + 2
    home, _ = choose(router, text, {0: 0, 1: 0}, media=(picture(b"one", BLOCK - 1, length),))
    other = 1 - home
    for media, held in (
        ((picture(b"one", BLOCK - 1, length),), 3),
        ((picture(b"two", BLOCK - 1, length),), 0),
        ((picture(b"one", BLOCK, length),), 0),
        ((picture(b"one", BLOCK - 1, length), picture(b"two", 2 * BLOCK + 1, 5)), 2),
        ((), 0),
    ):
        fresh = ReplicaRouter()
        assert choose(fresh, text, {home: 0}, media=(picture(b"one", BLOCK - 1, length),)) == (
            home,
            3 * BLOCK,
        )
        choose(fresh, text, {home: 0, other: 9 * BLOCK}, media=(picture(b"one", BLOCK - 1, length),))
        _, cost = choose(fresh, text, {home: 0, other: 9 * BLOCK}, media=media)
        assert cost == BLOCK * (3 - held)


def test_the_memory_is_bounded_and_keeps_the_beginnings_longest() -> None:
    router = ReplicaRouter()
    router.remembered = 4
    text = prompt(6)
    home, _ = choose(router, text, {0: 0, 1: 0})
    assert choose(router, text, {home: 1, 1 - home: 0}) == (home, 2 * BLOCK)
    endless = prompt(LONGEST + 10)
    router.remembered = 10_000
    home, _ = choose(router, endless, {0: 0, 1: 0})
    assert choose(router, endless, {home: 1, 1 - home: 0}) == (home, 10 * BLOCK)


def test_a_dead_replica_is_forgotten() -> None:
    router = ReplicaRouter()
    text = prompt(2)
    home, _ = choose(router, text, {0: 0, 1: 0})
    router.forget([home])
    assert choose(router, text, {home: 1, 1 - home: 0}) == (1 - home, 2 * BLOCK)
    assert choose(router, text, {home: 2 * BLOCK + 1, 1 - home: 2 * BLOCK}) == (1 - home, 0)


QUERY = Pooling(task="token_embed", late_query="q")
DOCUMENT = Pooling(task="token_embed", late_document="q")


def in_frame(request: Request) -> list[AddRequest]:
    assert isinstance(request, AddRequests)
    return request.adds


async def answered_query(found: Replicated) -> Stream[Pooled]:
    """A query whose vectors the first engine keeps."""
    [stream] = found.client.submit_many([([1, 2], QUERY)])
    [script] = [one for one in found.scripts if one.number == 0]
    await script.received(1)
    script.send(Outputs([Pooled(stream.id, Vectors(b"\0\0\0\0", (1,)))]))
    await found.until(lambda: not found.client.open_streams)
    return stream


async def test_documents_go_to_where_their_query_is(two: Two) -> None:
    client, first, _, both = two
    await answered_query(both)
    client.submit_many([([2] * 50, DOCUMENT)] * 4)
    assert len(in_frame((await first.received(1))[0])) == 4


async def test_a_query_is_sent_again_before_its_documents(connect: Connect) -> None:
    found = connect(restart_wait=60)
    first = await found.start(0)
    query = await answered_query(found)
    waiting = found.client.submit_many([([3], DOCUMENT), ([4], DOCUMENT)])
    await first.received(1)
    found.client.engine_exited(0, -9)
    found.end(first)
    again = await found.start(0)
    adds = in_frame((await again.received(1))[0])
    assert [add.id for add in adds] == [query.id, *(stream.id for stream in waiting)]
    assert adds[0] == AddRequest(query.id, [1, 2], QUERY)
    later = found.client.submit_many([([5], DOCUMENT)])
    assert [add.id for add in in_frame((await again.received(1))[0])] == [later[0].id], "once is enough"
    again.send(Outputs([Pooled(query.id, Vectors(b"\0\0\0\0", (1,)))]))
    await found.until(lambda: found.client.open_streams == 3)


async def test_a_query_goes_with_its_documents_to_another_replica(two: Two) -> None:
    client, first, second, both = two
    query = await answered_query(both)
    [document] = client.submit_many([([3], DOCUMENT)])
    await first.received(1)
    both.end(first)
    assert [add.id for add in in_frame((await second.received(1))[0])] == [query.id, document.id]


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_routing, "MOST_QUERIES", 2)
    queries = LateQueries()
    for name in "abc":
        queries.note(AddRequest(1, [1], replace(QUERY, late_query=name)), 0)
    asked = [AddRequest(2, [1], replace(DOCUMENT, late_document=name)) for name in "abc"]
    assert [queries.holder(add) for add in asked] == [None, 0, 0]
    queries.lose(0)
    assert [queries.holder(add) for add in asked] == [None, None, None]
    assert queries.missing(asked[0], 1) is None and queries.missing(asked[1], 1) is not None
