"""Answers that are not read: their engine is told, and so is the one that takes over."""

from __future__ import annotations

from scripted_engine import PARAMS, Two

from engine_core.protocol import Add, Go, Pause


async def test_the_engine_of_each_request_is_told_once(two: Two) -> None:
    client, first, second, _ = two
    long, short = client.submit([1] * 60, PARAMS), client.submit([2] * 20, PARAMS)
    client.pause([long.id, short.id, 77])
    client.pause([long.id])
    client.resume([short.id])
    client.resume([short.id, 77])
    assert (await first.received(2))[1:] == [Pause([long.id])]
    assert (await second.received(3))[1:] == [Pause([short.id]), Go([short.id])]
    client.pause([])
    client.submit([3], PARAMS)
    assert [type(request) for request in await second.received(1)] == [Add]


async def test_another_engine_is_told_with_the_request(two: Two) -> None:
    client, first, second, both = two
    stream, other = client.submit([1] * 60, PARAMS), client.submit([2], PARAMS, replica=0)
    client.pause([stream.id])
    await first.received(3)
    both.end(first)
    client.engine_exited(0, -9)
    add, pause = await second.received(2)
    assert isinstance(add, Add) and add.id == stream.id
    assert pause == Pause([stream.id])
    client.abort([stream.id, other.id])
    client.resume([stream.id])


async def test_a_request_that_goes_on_elsewhere_is_not_paused_there(two: Two) -> None:
    client, first, second, both = two
    stream = client.submit([1] * 60, PARAMS)
    client.pause([stream.id])
    client.resume([stream.id])
    await first.received(3)
    both.end(first)
    client.engine_exited(0, -9)
    client.submit([2], PARAMS)
    assert [type(request) for request in await second.received(2)] == [Add, Add]
