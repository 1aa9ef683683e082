"""Orders to load adapters, and what a client makes of the answers of its engines."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import Connect, Two

from engine_core.adapters.messages import Adapter, AdapterState, LoadAdapter
from worker.calls.messages import AdapterFacts, NoWorkers

FACTS = AdapterFacts(bytes=1)
OLD, NEW, NEWER = (Adapter("x", digest, "", "", "") for digest in ("old", "new", "newer"))


async def test_an_order_has_its_answers_though_a_later_one_of_another_client_overtakes_it(two: Two) -> None:
    client, first, second, _ = two
    asked = asyncio.create_task(client.adapters.load(NEW))
    for script in (first, second):
        await script.received(1)
    first.send(AdapterState(NEW, FACTS), AdapterState(NEWER, FACTS))
    while client.adapters.states.get("x") != AdapterState(NEWER, FACTS):
        await asyncio.sleep(0.001)
    second.send(AdapterState(NEW), AdapterState(NEWER, FACTS))
    assert await asyncio.wait_for(asked, 10) == ""
    assert client.adapters.states["x"].adapter == NEWER


async def test_a_name_means_what_it_did_if_the_adapter_that_was_to_replace_it_cannot_be_loaded(
    two: Two,
) -> None:
    client, first, second, _ = two
    asked = asyncio.create_task(client.adapters.load(OLD))
    for script in (first, second):
        await script.received(1)
        script.send(AdapterState(OLD, FACTS))
    assert await asked == ""
    asked = asyncio.create_task(client.adapters.load(NEW))
    for script, answer in ((first, AdapterState(NEW, FACTS)), (second, AdapterState(NEW, error="no"))):
        await script.received(1)
        script.send(answer)
    assert await asked == "no"
    for script in (first, second):
        assert await script.received(1) == [LoadAdapter(OLD, FACTS)]
        script.send(AdapterState(OLD, FACTS))
    while client.adapters.states != {"x": AdapterState(OLD, FACTS)}:
        await asyncio.sleep(0.001)


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
