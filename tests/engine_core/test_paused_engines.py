"""Engines that an operator pauses, with a worker without tensors: they compute nothing until they go on."""

import asyncio

from fake_worker import reference
from started_engines import Keep, Start, collect, first, soon, text, until

from engine_core.client.client import EngineClient
from engine_core.config import Replicas
from engine_core.protocol import PauseMode, Tokens
from worker.host.progress_page import IDLE
from worker.protocol import Sampling

QUIET = 0.2
"""Seconds in which an engine would have computed hundreds of tokens."""


async def test_what_runs_stands_still_and_goes_on(start: Start) -> None:
    engines, client = await start()
    stream = client.submit([5], Sampling(max_tokens=100))
    begun = await first(stream)
    await soon(client.orders.pause("keep"))
    rest = asyncio.create_task(collect(stream))
    come = asyncio.create_task(collect(client.submit([6], Sampling(max_tokens=3))))
    await asyncio.sleep(QUIET)
    assert client.orders.paused and not rest.done() and not come.done()
    assert engines.engines[0].page.read(0).state == IDLE, "it is not killed because it makes no progress"
    await soon(client.orders.resume())
    assert [*begun, *text(await rest)] == reference([5], 100) and text(await come) == reference([6], 3)
    assert not client.orders.paused


async def test_what_runs_is_finished_or_ended_and_what_comes_waits(start: Start) -> None:
    _, client = await start()
    modes: tuple[PauseMode, ...] = ("wait", "abort")
    for mode in modes:
        stream = client.submit([5], Sampling(max_tokens=60))
        begun = await first(stream)
        pausing = asyncio.create_task(client.orders.pause(mode))
        await asyncio.sleep(0)  # the order is sent
        come, gone = (client.submit([6], Sampling(max_tokens=3)) for _ in range(2))
        waiting, answer = asyncio.create_task(collect(come)), await collect(stream)
        if mode == "wait":
            assert [*begun, *text(answer)] == reference([5], 60)
        else:
            assert isinstance(answer[-1], Tokens) and answer[-1].finish == "abort"
        await soon(pausing)
        client.abort([gone.id])
        assert isinstance(last := (await collect(gone))[-1], Tokens) and last.finish == "abort"
        await asyncio.sleep(QUIET)
        assert not waiting.done(), mode
        await soon(client.orders.resume())
        assert text(await waiting) == reference([6], 3)


async def test_a_pause_that_waits_ends_when_requests_shall_go_on(start: Start) -> None:
    _, client = await start()
    stream = client.submit([5], Sampling(max_tokens=100))
    await first(stream)
    client.pause([stream.id])  # so that the pause of all never comes about
    pausing = asyncio.create_task(client.orders.pause("wait"))
    await asyncio.sleep(0)
    come = client.submit([6], Sampling(max_tokens=3))
    await soon(client.orders.resume())
    await soon(pausing)
    assert text(await collect(come)) == reference([6], 3) and not client.orders.paused


async def test_all_replicas_and_every_server_obey_also_one_that_is_started_again(keep: Keep) -> None:
    engines, client, _ = await keep(replicas=2, api_servers=2)
    other = EngineClient(engines.addresses[1], Replicas(size=2, here=2))
    await soon(until(lambda: all(one.works for one in client.replicas) and len(client.replicas) == 2))
    await soon(client.orders.pause("abort"))
    await soon(other.orders.until(lambda _: other.orders.paused))
    engines.engines[0].process.kill()
    await soon(until(lambda: not any(each.replicas[0].works for each in (client, other))))
    await soon(until(lambda: all(each.replicas[0].works for each in (client, other))))
    streams = [
        each.submit([6], Sampling(max_tokens=3), replica=number)
        for each in (client, other)
        for number in (0, 1)
    ]
    waiting = [asyncio.create_task(collect(stream)) for stream in streams]
    await asyncio.sleep(QUIET)
    assert not any(each.done() for each in waiting)
    await soon(other.orders.resume())
    assert [text(await each) for each in waiting] == [reference([6], 3)] * 4
    other.close()
