"""Vectors that are kept: which texts reach the engine, and what becomes of those that wait for others."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fake_client import FakeClient
from reading import beginning

from server.errors import DeadlineExceeded, Internal
from server.frontend.frontend import Frontend
from server.requests.pooling import Item
from server.requests.vectors import as_array
from server.text.tokenizer import pack, unpack
from worker.protocol import Pooling

EMBED = Pooling(task="embed")


@pytest.fixture
async def frontend(ready: Callable[..., Awaitable[Frontend]]) -> Frontend:
    return await ready("--vector-cache-gib", "0.001")


def texts(*ids: int, params: Pooling = EMBED) -> list[Item]:
    return [Item([id, 1], params) for id in ids]


async def answered(client: FakeClient, frontend: Frontend, items: list[Item], **options: object) -> int:
    """How many of the items reached the engine, which answers each with the first of its tokens."""
    before = len(client.submitted)
    task = await beginning(frontend.pool(items, **options))  # pyright: ignore[reportArgumentType]
    for one in client.submitted[before:]:
        one.answer([one.tokens[0]])
    answers = await task
    assert [as_array(one.vectors)[0] for one in answers] == [unpack(item.tokens)[0] for item in items]
    return len(client.submitted) - before


async def test_a_text_that_comes_again_is_not_computed(client: FakeClient, frontend: Frontend) -> None:
    assert await answered(client, frontend, texts(5, 6, 5)) == 2
    [kept, new] = await asyncio.gather(frontend.pool(texts(6)), answered(client, frontend, texts(6, 7)))
    assert (kept[0].cached, new) == (2, 1)
    page = frontend.metrics.page().decode()
    assert 'facet:vector_cache_queries_total{engine="0",model_name="m"} 6.0' in page
    assert 'facet:vector_cache_hits_total{engine="0",model_name="m"} 3.0' in page
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 12.0' in page


async def test_what_decides_a_vector_is_in_its_key(client: FakeClient, frontend: Frontend) -> None:
    assert await answered(client, frontend, texts(5)) == 1
    assert await answered(client, frontend, texts(5), salt="mine") == 1
    assert await answered(client, frontend, texts(5, params=Pooling(task="embed", dimensions=1))) == 1
    assert await answered(client, frontend, texts(5, params=Pooling(task="token_embed"))) == 1
    assert await answered(client, frontend, texts(5, params=Pooling(task="token_embed", late_query="q"))) == 1
    assert await answered(client, frontend, texts(5), priority=9, owner="o", weight=2.0, budget=5.0) == 0
    assert await answered(client, frontend, texts(5), salt="mine") == 0
    assert await answered(client, frontend, [Item(pack([5, 1]), EMBED)]) == 0
    client.become_ready(fingerprint="fp_other")  # another engine in its place
    assert await answered(client, frontend, texts(5)) == 1


async def test_32_equal_texts_at_once_are_computed_once(client: FakeClient, frontend: Frontend) -> None:
    tasks = [await beginning(frontend.pool(texts(5))) for _ in range(32)]
    assert [one.tokens for one in client.submitted] == [[5, 1]]
    client.submitted[0].answer([0.5])
    assert {float(as_array(answer.vectors)[0]) for task in tasks for answer in await task} == {0.5}
    assert len(client.submitted) == 1 and frontend.live == 0


async def test_texts_outlive_the_request_they_waited_for(client: FakeClient, frontend: Frontend) -> None:
    first, second, third = [await beginning(frontend.pool(texts(5))) for _ in range(3)]
    first.cancel()
    await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await first
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(client.submitted) == 2, "one of the two that are left computes it for both"
    client.submitted[1].fail(500, "non-finite")
    with pytest.raises(Internal):
        await second
    for _ in range(5):
        await asyncio.sleep(0)
    client.submitted[2].answer([3])
    assert as_array((await third)[0].vectors) == [3]


async def test_nobody_waits_for_less_urgent_texts_or_beyond_a_deadline(
    client: FakeClient, frontend: Frontend
) -> None:
    late = await beginning(frontend.pool(texts(5), priority=3))
    soon = await beginning(frontend.pool(texts(5), priority=1))
    assert len(client.submitted) == 2
    with pytest.raises(DeadlineExceeded):
        await frontend.pool(texts(5), priority=3, budget=0.01)
    client.submitted[1].answer([5])
    client.submitted[0].answer([5])
    await asyncio.gather(late, soon)
    assert await answered(client, frontend, texts(5)) == 0


async def test_the_oldest_vectors_go_when_room_is_needed(client: FakeClient, frontend: Frontend) -> None:
    async def is_computed(id: int) -> bool:
        before = len(client.submitted)
        task = await beginning(frontend.pool(texts(id)))
        for one in client.submitted[before:]:
            one.answer([id] * 100_000)  # of which a thousandth of a GiB holds two
        assert len((await task)[0].vectors.data) == 400_000
        return len(client.submitted) > before

    assert [await is_computed(id) for id in (1, 2, 1, 3, 1, 2)] == [True, True, False, True, False, True]
    assert frontend.kept_vectors is not None
    frontend.kept_vectors.clear()
    assert await is_computed(1)
