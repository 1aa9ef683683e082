"""Engines that give weights and cache back, and load them again, with a worker that has no tensors."""

import asyncio
from pathlib import Path

from fake_worker import reference
from started_engines import Start, collect, first, soon, text

from engine_core.client.client import EngineClient
from engine_core.protocol import Failed, Tokens
from worker.protocol import Sampling


async def answer(client: EngineClient, token: int) -> list[Tokens | Failed]:
    return await collect(client.submit([token], Sampling(max_tokens=3)))


def is_refused(outputs: list[Tokens | Failed]) -> bool:
    last = outputs[-1]
    return isinstance(last, Failed) and (last.code, last.error) == (503, "asleep")


async def test_what_runs_is_finished_and_what_comes_is_refused(start: Start) -> None:
    _, client = await start()
    stream = client.submit([5], Sampling(max_tokens=60))
    begun = await first(stream)
    asleep = asyncio.create_task(client.orders.sleep(1))
    await asyncio.sleep(0)  # the order is sent
    assert is_refused(await answer(client, 6)) and not asleep.done()
    assert [*begun, *text(await collect(stream))] == reference([5], 60)
    await soon(asleep)
    assert client.orders.asleep and is_refused(await answer(client, 6))
    for _ in range(2):  # the second time it is awake already
        assert await client.orders.wake() == "" and not client.orders.asleep
        assert text(await asyncio.wait_for(answer(client, 6), 20)) == reference([6], 3)


async def test_what_runs_can_be_ended(start: Start) -> None:
    _, client = await start()
    stream = client.submit([5], Sampling(max_tokens=100))
    await first(stream)
    await soon(client.orders.sleep(2, abort=True))
    last = (await collect(stream))[-1]
    assert isinstance(last, Tokens) and last.finish == "abort"
    await client.orders.sleep(1)  # again
    assert client.orders.asleep


async def test_all_replicas_sleep_and_wake(start: Start) -> None:
    _, client = await start(replicas=2)
    await soon(client.orders.sleep(1))
    assert [one.asleep for one in client.replicas if one.works] in ([True], [True, True])
    assert await client.orders.wake() == ""
    assert text(await answer(client, 6)) == reference([6], 3)


async def test_every_server_knows_also_one_that_comes_later(start: Start) -> None:
    engines, client = await start(api_servers=2)
    other = EngineClient(engines.addresses[1])
    await soon(other.ready_or_dead.wait())
    await soon(client.orders.sleep(1))
    await soon(other.orders.sleep(1))  # it is so already
    assert other.orders.asleep
    other.close()
    later = EngineClient(engines.addresses[1])
    await soon(later.orders.sleep(1))
    await soon(later.ready_or_dead.wait())
    await soon(later.orders.until(lambda one: one.asleep))
    assert await later.orders.wake() == ""
    await soon(client.orders.until(lambda one: not one.asleep))
    assert text(await answer(client, 7)) == reference([7], 3)
    later.close()


async def test_an_engine_that_cannot_wake_says_why_and_sleeps_on(start: Start, model: Path) -> None:
    _, client = await start()
    await soon(client.orders.sleep(1))
    (model / "no-weights").touch()
    for _ in range(2):
        assert "lm_head.weight" in await client.orders.wake()
        assert client.orders.asleep and is_refused(await answer(client, 6))
    (model / "no-weights").unlink()
    assert await client.orders.wake() == ""
    assert text(await answer(client, 6)) == reference([6], 3)


async def test_who_waits_learns_that_the_engine_has_ended(start: Start) -> None:
    engines, client = await start()
    stream = client.submit([5], Sampling(max_tokens=100))
    await first(stream)
    client.pause([stream.id])
    asleep = asyncio.create_task(client.orders.sleep(1))
    await asyncio.sleep(0.1)
    engines.engines[0].process.kill()
    await soon(asleep)
    assert not client.orders.asleep


async def test_a_sleeping_engine_ends_when_it_is_asked_to(start: Start) -> None:
    engines, client = await start()
    await soon(client.orders.sleep(1))
    client.drain(5.0)
    await soon(client.died.wait())
    assert engines.engines[0].process.wait() == 0
