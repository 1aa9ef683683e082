"""Orders to load adapters, and what a client makes of the answers of its engines."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from scripted_engine import Connect, Script, Two

from engine_core.adapters.messages import Adapter, AdapterState, LoadAdapter
from worker.calls.messages import AdapterFacts, NoWorkers

FACTS = AdapterFacts(bytes=1)
OLD, NEW = (Adapter("x", digest, "", "", "") for digest in ("old", "new"))


async def order_of(script: Script) -> Adapter:
    [order] = await script.received(1)
    assert isinstance(order, LoadAdapter)
    return order.adapter


async def test_an_order_has_its_answers_though_a_later_one_of_another_client_overtakes_it(two: Two) -> None:
    client, first, second, _ = two
    asked = asyncio.create_task(client.adapters.load(NEW))
    order, _ = await order_of(first), await order_of(second)
    newer = AdapterState(replace(order, digest="newer", ordered=order.ordered + 1), FACTS)
    first.send(AdapterState(order, FACTS), newer)
    while client.adapters.states.get("x") != newer:
        await asyncio.sleep(0.001)
    second.send(AdapterState(order), newer)
    assert await asyncio.wait_for(asked, 10) == ""
    assert client.adapters.states["x"] == newer


async def test_a_name_means_what_it_did_if_the_adapter_that_was_to_replace_it_cannot_be_loaded(
    two: Two,
) -> None:
    client, first, second, _ = two
    asked = asyncio.create_task(client.adapters.load(OLD))
    for script in (first, second):
        script.send(AdapterState(await order_of(script), FACTS))
    assert await asked == ""
    asked = asyncio.create_task(client.adapters.load(NEW))
    for script, facts, error in ((first, FACTS, ""), (second, None, "no")):
        script.send(AdapterState(await order_of(script), facts, error))
    assert await asked == "no"
    for script in (first, second):
        order = await order_of(script)
        assert order.digest == "old"
        script.send(AdapterState(order, FACTS))
    while client.adapters.states["x"].adapter.digest != "old":
        await asyncio.sleep(0.001)


async def test_an_adapter_that_was_dropped_does_not_come_back_with_an_engine(two: Two) -> None:
    client, first, second, _ = two
    asked = asyncio.create_task(client.adapters.load(OLD))
    for script in (first, second):
        script.send(AdapterState(order := await order_of(script), FACTS))
    await asked
    await client.adapters.drop("x")
    [dropped], _ = await first.received(1), await second.received(1)
    first.send(AdapterState(order, FACTS))  # another client restored it, which had not heard yet
    assert await first.received(1) == [dropped]
    assert not client.adapters.states


async def test_an_order_that_no_engine_could_take_is_not_said_to_be_done(connect: Connect) -> None:
    one = connect()
    script = await one.start(0)
    asked = asyncio.create_task(one.client.adapters.load(NEW))
    await script.received(1)
    one.end(script)
    assert await asyncio.wait_for(asked, 10) is None
    assert await one.client.adapters.load(NEW) is None
    with pytest.raises(NoWorkers, match="no engine works now"):
        await one.client.orders.update_weights("/new")
